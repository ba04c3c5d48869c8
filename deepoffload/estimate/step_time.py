"""How long a step takes: the model's own sequence of uses, played on the simulated clock with the engine's planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepoffload.config import Config
from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.coarser import PIECES_MAX, coarser
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.step_costs import OpTimes, StepCosts
from deepoffload.params.prefetcher import BUSY_TRANSFERS, EVENTS_PER_PLAN, WRITE_BEHIND_SHARE
from deepoffload.schedule.clock import StepTimes, TimedRun, TimedUse
from deepoffload.schedule.cost_model import (
    AccumulationOrder,
    Bandwidths,
    BlockKind,
    RankTraffic,
    StepOverlap,
    Workload,
)
from deepoffload.schedule.events import Phase
from deepoffload.schedule.speculation import FIRST_SHARE_ON_DEVICE, ROOM_MARGIN, would_pay
from deepoffload.schedule.steady import steady_step
from deepoffload.schedule.uses import Guessing, seen_until_zero_grad, step_uses, unit_blocks


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
    guesses_all = machine.has_device and blocks.rank is None
    units = unit_blocks(placement.blocks, placement.resident, on_device=guesses_all)
    costs = StepCosts(blocks, units, run, machine, op_times or {}, workload, pieces_in_one)
    uses = costs.timed(step_uses(run.visits, units, workload, guessing=_guessing(blocks, machine)))
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
            device=costs.device(),
        )

    discards = seen_until_zero_grad(units, workload)
    times, played = steady_step(make, uses, first=first, discards=discards)
    compute_s = sum(use.seconds for use in uses)
    model_s = sum(use.seconds for use in uses if use.phase is not Phase.UPDATE)
    if machine.has_device:
        model_s = sum(use.device_work.seconds for use in uses if use.device_work is not None)
        compute_s += model_s
    bound = _bound(times, _busy(times, uses, model_s))
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


def _guessing(blocks: BlockPlan, machine: MachineSpec) -> Guessing:
    """What the engine begins with. On a device, memory that nothing else takes keeps what staying blocks were; several
    ranks guess what moves, with a device and without one."""
    if not machine.has_device or blocks.rank is not None:
        return Guessing()
    placement = blocks.placement
    taken_bytes = sum(block.nbytes for block in placement.blocks if block.id in placement.resident)
    free_bytes = placement.capacity_bytes - taken_bytes - placement.reserve_bytes
    return Guessing(FIRST_SHARE_ON_DEVICE, free_bytes / ROOM_MARGIN)


LINK, BUS = "the link between ranks", "the bus between host and device"


def _busy(times: StepTimes, uses: Sequence[TimedUse], model_s: float) -> dict[str, float]:
    """For how long a step needs what it is made of. Landings and updates share the host's memory."""
    update_s = sum(use.seconds for use in uses if use.phase is Phase.UPDATE)
    works = [use.device_work for use in uses if use.device_work is not None]
    launch_s = sum(use.seconds for use in uses if use.device_work is not None)
    landing_s = sum(work.landing_s - work.link_s for work in works)
    what = "the update" if update_s >= landing_s else "gradients that land"
    return {
        "computing": model_s,
        f"memory bandwidth ({what})": update_s + landing_s,
        "launching what the device computes": launch_s,
        LINK: times.link_s,
        BUS: times.bus_s,
    }


def _bound(times: StepTimes, busy: dict[str, float]) -> str:
    if busy[LINK] > 0.5 * times.seconds:
        return LINK
    if busy[BUS] > 0.8 * times.seconds:
        return BUS
    if times.wait_s < 0.1 * times.seconds:
        return max(busy, key=lambda what: busy[what])
    if times.busy_s > 0.8 * times.seconds:
        return "disk"
    return "disk, part of the time: too little memory to look far enough ahead"
