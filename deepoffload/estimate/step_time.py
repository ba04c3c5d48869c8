"""How long a step takes: the model's own sequence of uses, played on the simulated clock with the engine's planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.coarser import coarser
from deepoffload.estimate.dry_run import DryRun, Op, Visit
from deepoffload.estimate.machine import MachineSpec
from deepoffload.params.prefetcher import BUSY_TRANSFERS, EVENTS_PER_PLAN, WRITE_BEHIND_SHARE
from deepoffload.schedule.clock import StepTimes, TimedRun, TimedUse, steady_step
from deepoffload.schedule.cost_model import BlockKind, StepOverlap, Workload, update_seconds
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.simulate import Use
from deepoffload.schedule.trace import Event, Phase

OpTimes = Mapping[Op, float]


@dataclass(frozen=True)
class StepEstimate:
    """A predicted optimizer step of one rank. ``compute_s``: of it, what is computed and not waited for.

    ``bound``: what would have to be faster for the step to be. ``efficiency``: the share of the step in which the model
    itself is computed.
    """

    times: StepTimes
    compute_s: float
    model_s: float
    tokens: int
    flops: int
    bound: str
    ever_written: frozenset[int]

    @property
    def seconds(self) -> float:
        return self.times.seconds

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
) -> StepEstimate:
    """Predict a step in steady state.

    Args:
        tokens: of one micro-batch.
        op_times: seconds of operators as measured; what is not in it is worked out from the machine's rates.
    """
    blocks, pieces_in_one = coarser(blocks)
    costs = _Costs(blocks, run, machine, op_times or {}, workload.accumulation_steps, pieces_in_one)
    uses = list(_uses(costs, workload))
    placement, bandwidths = blocks.placement, machine.bandwidths()
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
        )

    first = uses
    if workload.step_overlap is StepOverlap.DEFERRED:
        first = [use for use in uses if use.phase is not Phase.UPDATE]
    kept = workload.step_overlap is StepOverlap.NONE  # gradients are seen until zero_grad()
    discards = [block.id for block in costs.gradients.values()] if kept else []
    times, played = steady_step(make, uses, first=first, discards=discards)
    compute_s = sum(use.seconds for use in uses)
    model_s = sum(use.seconds for use in uses if use.phase is not Phase.UPDATE)
    bound = _bound(times, compute_s, model_s)
    k = workload.accumulation_steps
    written = frozenset(played.ever_written)
    return StepEstimate(times, compute_s, model_s, tokens * k, run.flops * k, bound, written)


def _bound(times: StepTimes, compute_s: float, model_s: float) -> str:
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
        run: DryRun,
        machine: MachineSpec,
        op_times: OpTimes,
        accumulation_steps: int,
        pieces_in_one: Mapping[int, int],
    ) -> None:
        self._pieces_in_one = pieces_in_one
        self.visits = run.visits
        self.weights: dict[int, BlockSpec] = {}
        self.gradients: dict[int, BlockSpec] = {}
        self.state: dict[int, list[BlockSpec]] = defaultdict(list)
        self._state_bytes: dict[int, int] = defaultdict(int)
        for block in blocks.placement.blocks:
            if block.kind is BlockKind.WEIGHT:
                self.weights[block.unit] = block
            elif block.kind is BlockKind.GRADIENT:
                self.gradients[block.unit] = block
            else:
                self.state[block.unit].append(block)
                self._state_bytes[block.unit] += blocks.content_bytes[block.id]
        self._content = blocks.content_bytes
        self._machine = machine
        self._op_times = op_times
        self._bandwidths = machine.bandwidths()
        self._again = (accumulation_steps - 1) / accumulation_steps  # landings that add to what is there
        self._plan_s = machine.plan_overhead_s if blocks.placement.paged else 0.0
        self._trained = blocks.trained_by_unit

    def visit_s(self, visit: Visit) -> float:
        seconds = sum(count * self._op_s(op) for op, count in visit.ops.items()) + self._plan_s
        if not visit.backward:
            seconds += self._machine.visit_overhead_s
        if self._machine.has_device:
            moved = sum(self._content[self.weights[unit].id] for unit in visit.units)
            return max(seconds, moved / self._machine.link_bytes_per_s)
        return seconds

    def _op_s(self, op: Op) -> float:
        machine = self._machine
        measured = self._op_times.get(op)
        if measured is not None:
            return measured + machine.op_overhead_s
        busy = max(op.flops / machine.flops_per_s, op.nbytes / machine.device_bytes_per_s)
        return busy + machine.op_overhead_s

    def landing_s(self, unit: int, count: int) -> float:
        """A pass over gradients: read what autograd made, write it to the block, or read, add and write.

        ``count``: of how many of the unit's parameters.
        """
        touched = self._content[self.gradients[unit].id] * (2 + self._again) * count / self._trained[unit]
        return update_seconds(round(touched), self._bandwidths) + self._machine.landing_overhead_s * count

    def update_s(self, unit: int, piece: BlockSpec) -> float:
        """The piece and the weights are read and written, the gradients read."""
        share = self._content[piece.id] / self._state_bytes[unit]
        weights, gradients = self._content[self.weights[unit].id], self._content[self.gradients[unit].id]
        touched = 2 * self._content[piece.id] + share * (2 * weights + gradients)
        fixed = (self._machine.piece_overhead_s + self._plan_s) * self._pieces_in_one.get(piece.id, 1)
        return update_seconds(round(touched), self._bandwidths) + fixed


def _uses(costs: _Costs, workload: Workload) -> Iterator[TimedUse]:
    """The uses of one step in the order in which the engine sees them."""
    keys: dict[tuple[object, ...], int] = {}
    pending = set(costs.state)
    key_of: Callable[..., int] = lambda *key: keys.setdefault(key, len(keys))  # noqa: E731

    def update(unit: int) -> Iterator[TimedUse]:
        weights, gradients, pieces = costs.weights[unit].id, costs.gradients[unit].id, costs.state[unit]
        for number, piece in enumerate(pieces):
            event = Event(key_of("u", unit, number), (weights, gradients, piece.id))
            last = number == len(pieces) - 1
            drops = (gradients,) if last and workload.step_overlap is not StepOverlap.NONE else ()
            yield TimedUse(Use(event, (weights, piece.id), drops), Phase.UPDATE, costs.update_s(unit, piece))

    last_landing = {unit: number for number, visit in enumerate(costs.visits) for unit in visit.landed}
    for micro in range(workload.accumulation_steps):
        for number, visit in enumerate(costs.visits):
            if not visit.backward and micro == 0 and workload.step_overlap is StepOverlap.DEFERRED:
                for unit in visit.units:
                    if unit in pending:
                        pending.discard(unit)
                        yield from update(unit)
            yield _visit_use(costs, visit, key_of)
            if micro == workload.accumulation_steps - 1 and workload.step_overlap is StepOverlap.IN_BACKWARD:
                for unit in visit.landed:
                    if unit in pending and last_landing[unit] == number:
                        pending.discard(unit)
                        yield from update(unit)
    for unit in sorted(pending):
        yield from update(unit)


def _visit_use(costs: _Costs, visit: Visit, key_of: Callable[..., int]) -> TimedUse:
    seconds = costs.visit_s(visit)
    weights = tuple(costs.weights[unit].id for unit in visit.units)
    if not visit.backward:
        return TimedUse(Use(Event(key_of("f", *visit.units), weights)), Phase.FORWARD, seconds)
    gradients = {unit: costs.gradients[unit].id for unit in visit.units if unit in costs.gradients}
    landed = {unit: count for unit, count in visit.landed.items() if unit in gradients}
    seconds += sum(costs.landing_s(unit, count) for unit, count in landed.items())
    event = Event(key_of("b", *visit.units), (*weights, *gradients.values()))
    writes = tuple(gradients[unit] for unit in landed)
    named = tuple(block for unit, block in gradients.items() if unit not in landed)
    return TimedUse(Use(event, writes, named=named), Phase.BACKWARD, seconds)
