"""How long a step takes: the model's own sequence of uses, played on the simulated clock with the engine's planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from deepoffload.config import Config
from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.coarser import PIECES_MAX, coarser
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.recording import DryRun, Op
from deepoffload.params.prefetcher import BUSY_TRANSFERS, EVENTS_PER_PLAN, WRITE_BEHIND_SHARE
from deepoffload.schedule.accumulation_order import SWITCH_S
from deepoffload.schedule.clock import StepTimes, TimedRun, TimedUse, steady_step
from deepoffload.schedule.cost_model import (
    AccumulationOrder,
    Bandwidths,
    BlockKind,
    RankTraffic,
    StepOverlap,
    Workload,
    update_seconds,
)
from deepoffload.schedule.events import Phase
from deepoffload.schedule.speculation import would_pay
from deepoffload.schedule.uses import StepUse, UnitBlocks, seen_until_zero_grad, step_uses, unit_blocks

OpTimes = Mapping[Op, float]


@dataclass(frozen=True)
class StepEstimate:
    """A predicted optimizer step of one rank. ``compute_s``: of it, what is computed and not waited for.

    ``activation_bytes``: what of activations goes to NVMe and comes back, for which the program waits
    ``activation_wait_s``. ``bound``: what would have to be faster for the step to be. ``efficiency``: the share of the
    step in which the model itself is computed. ``from_others``: with several ranks, what this one gets from the others.
    """

    times: StepTimes
    compute_s: float
    model_s: float
    tokens: int
    flops: int
    bound: str
    ever_written: frozenset[int]
    step_overlap: StepOverlap
    from_others: RankTraffic = RankTraffic()
    activation_bytes: int = 0
    activation_wait_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.times.seconds + self.activation_wait_s

    def moving_activations(self, nbytes: int, bandwidths: Bandwidths) -> StepEstimate:
        """The same where activations of ``nbytes`` per step go to NVMe and come back: the disk has the time for it in
        which it moves no blocks, and the program waits for the rest."""
        idle_s = max(0.0, self.times.seconds - self.times.busy_s)
        moving_s = nbytes / bandwidths.write_bytes_per_s + nbytes / bandwidths.read_bytes_per_s
        return replace(self, activation_bytes=nbytes, activation_wait_s=max(0.0, moving_s - idle_s))

    @property
    def efficiency(self) -> float:
        return self.model_s / self.seconds if self.seconds else 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def estimate_step(
    blocks: BlockPlan,
    run: DryRun,
    machine: MachineSpec,
    workload: Workload,
    *,
    tokens: int,
    op_times: OpTimes | None = None,
    pieces_max: int = PIECES_MAX,
) -> StepEstimate:
    """Predict a step in steady state.

    Args:
        tokens: of one micro-batch.
        op_times: seconds of operators as measured; what is not in it is worked out from the machine's rates.
        pieces_max: about how many pieces of state are played; of more, several are put together.
    """
    blocks, pieces_in_one = coarser(blocks, pieces_max)
    placement, bandwidths = blocks.placement, machine.bandwidths()
    units = unit_blocks(placement.blocks, placement.resident)
    costs = _Costs(blocks, units, run, machine, op_times or {}, workload, pieces_in_one)
    uses = costs.timed(step_uses(run.visits, units, workload))
    first = costs.timed(step_uses(run.visits, units, workload, first=True))
    sizes = {block.id: block.nbytes for block in placement.blocks}

    def make() -> TimedRun:
        return TimedRun(
            sizes,
            {block.id: blocks.content_bytes[block.id] for block in placement.blocks},
            placement.capacity_bytes,
            bandwidths,
            lookahead_bytes=placement.lookahead_bytes,
            reserve_bytes=placement.reserve_bytes,
            static=placement.resident,
            empty=[block.id for block in placement.blocks if block.kind is BlockKind.GRADIENT],
            write_behind_share=WRITE_BEHIND_SHARE,
            computing_share=machine.nvme_share_while_computing,
            events_per_plan=EVENTS_PER_PLAN,
            busy_transfers=BUSY_TRANSFERS,
            copies=None if blocks.rank is None else blocks.rank.copies(units, machine.round_overhead_s),
        )

    discards = seen_until_zero_grad(units, workload)
    times, played = steady_step(make, uses, first=first, discards=discards)
    compute_s = sum(use.seconds for use in uses)
    model_s = sum(use.seconds for use in uses if use.phase is not Phase.UPDATE)
    bound = _bound(times, compute_s, model_s)
    k = workload.accumulation_steps
    written = frozenset(played.ever_written)
    reduced = 0 if blocks.rank is None else k * sum(blocks.rank.reduced_bytes(unit) for unit in units)
    from_others = RankTraffic(times.gathered_bytes, reduced)
    overlap = workload.step_overlap
    return StepEstimate(times, compute_s, model_s, tokens * k, run.flops * k, bound, written, overlap, from_others)


def estimate_usual_step(
    blocks: BlockPlan,
    run: DryRun,
    machine: MachineSpec,
    config: Config,
    order: AccumulationOrder,
    *,
    tokens: int,
    op_times: OpTimes | None = None,
) -> StepEstimate:
    """The same of the steps that the engine comes to make: where nobody asks for guesses, it makes them if deferred
    steps wait long for the disk. ``order``: of the micro-batches. Other arguments as of :func:`estimate_step`."""
    placed = blocks.placement.step_overlap
    overlap = config.step_overlap or StepOverlap.DEFERRED
    workload = Workload(config.gradient_accumulation_steps, overlap, order=order)
    step = estimate_step(blocks, run, machine, workload, tokens=tokens, op_times=op_times)
    waits_s = step.times.wait_s - step.times.backward_wait_s
    if placed is workload.step_overlap or not would_pay(waits_s, step.seconds):
        return step
    return estimate_step(blocks, run, machine, replace(workload, step_overlap=placed), tokens=tokens, op_times=op_times)


def _bound(times: StepTimes, compute_s: float, model_s: float) -> str:
    if times.link_s > 0.5 * times.seconds:
        return "the link between ranks"
    if times.wait_s < 0.1 * times.seconds:
        return "computing" if model_s >= compute_s / 2 else "memory bandwidth (the update)"
    if times.busy_s > 0.8 * times.seconds:
        return "disk"
    return "disk, part of the time: too little memory to look far enough ahead"


class _Costs:
    """Seconds of everything that a step computes."""

    def __init__(
        self,
        blocks: BlockPlan,
        units: Mapping[int, UnitBlocks],
        run: DryRun,
        machine: MachineSpec,
        op_times: OpTimes,
        workload: Workload,
        pieces_in_one: Mapping[int, int],
    ) -> None:
        self._units = units
        self._visits = run.visits
        self._content = blocks.content_bytes
        self._state_bytes = {n: sum(self._content[block] for block in unit.state) for n, unit in units.items()}
        self._machine = machine
        self._op_times = op_times
        self._bandwidths = machine.bandwidths()
        k = workload.accumulation_steps
        self._again = (k - 1) / k  # landings that add to what is there
        self._together = workload.together
        self._switch_s = SWITCH_S if workload.together > 1 else 0.0
        self._plan_s = machine.plan_overhead_s if blocks.placement.paged else 0.0
        self._trained = blocks.trained_by_unit
        self._pieces_in_one = pieces_in_one
        self._rank = blocks.rank

    def timed(self, uses: Iterable[StepUse]) -> list[TimedUse]:
        return [self._timed(use) for use in uses]

    def _timed(self, use: StepUse) -> TimedUse:
        seconds = self._update_s(use) if use.phase is Phase.UPDATE else self._visit_s(use)
        if self._rank is None:
            return TimedUse(use.use, use.phase, seconds)
        weights = tuple(self._units[unit].weights for unit in use.units)
        if use.phase is Phase.UPDATE:
            return TimedUse(use.use, use.phase, seconds, changed=weights)
        landed = [item for number in use.visits for item in self._visits[number].landed.items()]
        reduce_s = sum(self._rank.reduce_s(unit) * count / self._trained[unit] for unit, count in landed)
        return TimedUse(use.use, use.phase, seconds, link_s=self._together * reduce_s, shown=weights)

    def _visit_s(self, use: StepUse) -> float:
        machine, visits = self._machine, [self._visits[number] for number in use.visits]
        seconds = sum(count * self._op_s(op) for visit in visits for op, count in visit.ops.items()) + self._switch_s
        if use.phase is Phase.FORWARD:
            seconds += machine.visit_overhead_s
        seconds = self._together * seconds + self._plan_s
        if machine.has_device:
            moved = sum(self._content[self._units[unit].weights] for unit in use.units)
            seconds = max(seconds, moved / machine.link_bytes_per_s)
        landed = [item for visit in visits for item in visit.landed.items()]
        return seconds + self._together * sum(self._landing_s(unit, count) for unit, count in landed)

    def _op_s(self, op: Op) -> float:
        machine = self._machine
        measured = self._op_times.get(op)
        if measured is not None:
            return measured + machine.op_overhead_s
        busy = max(op.flops / machine.flops_per_s, op.nbytes / machine.device_bytes_per_s)
        return busy + machine.op_overhead_s

    def _landing_s(self, unit: int, count: int) -> float:
        """A pass over gradients: read what autograd made, write it to the block, or read, add and write. With several
        ranks they are copied for the ranks that own them, and the link's rate has the rest.

        ``count``: of how many of the unit's parameters.
        """
        gradients = self._units[unit].gradients
        if gradients is None:
            return 0.0
        touches, nbytes = 2 + self._again, self._content[gradients]
        if self._rank is not None:
            touches, nbytes = 2, self._rank.contribution_bytes[unit]
        touched = nbytes * touches * count / self._trained[unit]
        return update_seconds(round(touched), self._bandwidths) + self._machine.landing_overhead_s * count

    def _update_s(self, use: StepUse) -> float:
        """The piece and the weights are read and written, the gradients read."""
        (number,) = use.units
        unit = self._units[number]
        piece = unit.state[use.piece]
        share = self._content[piece] / self._state_bytes[number]
        weights = self._content[unit.weights]
        gradients = 0 if unit.gradients is None else self._content[unit.gradients]
        touched = 2 * self._content[piece] + share * (2 * weights + gradients)
        fixed = (self._machine.piece_overhead_s + self._plan_s) * self._pieces_in_one.get(piece, 1)
        return update_seconds(round(touched), self._bandwidths) + fixed
