"""Does it fit, where does what go, how long does a step take; the smallest budget and the largest model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deepoffload.config import Config
from deepoffload.config.resolve import may_use_nvme, unsaid_host_bytes, unsaid_nvme_bytes
from deepoffload.config.units import at_least, at_most, format_bytes, parse_bytes
from deepoffload.errors import ConfigError, DevicePlacementError, PlacementError
from deepoffload.estimate.blocks import UNBOUNDED_BYTES, BlockPlan, Planner
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.decoder import DecoderShape
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.memory import ON_THEIR_WAY, WHOLE_COPIES, MemoryEstimate, estimate_memory
from deepoffload.estimate.offloaded import Leaving, leaving
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.rank_share import planned_link
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.runs import RunsByOrder, shared_gradient_bytes, together_in
from deepoffload.estimate.step_time import OpTimes, StepEstimate, estimate_usual_step
from deepoffload.estimate.subject import Batch, Subject, from_shape
from deepoffload.runtime.refusals import of_host
from deepoffload.schedule.cost_model import AccumulationOrder, Bandwidths

HEADS_OF = 128
"""Width of a head in the models that are tried for the largest one."""


@dataclass(frozen=True)
class WithDisk:
    """A way out for a model that does not fit, by more NVMe. Bytes are one rank's.

    budget_bytes: of host memory; the one that was asked about, or the nearest one that works and that
    ``format_bytes`` says exactly. nvme_bytes: that the rest needs then.
    """

    budget_bytes: int
    nvme_bytes: int


@dataclass(frozen=True)
class InOrder:
    """A step whose micro-batches are run in another order, and the memory of that."""

    order: AccumulationOrder
    step: StepEstimate
    memory: MemoryEstimate


@dataclass(frozen=True)
class Estimate:
    """Everything about one model on one machine. Bytes are one rank's; budgets of the configuration are a node's.

    capacity_bytes: the budget of the arena: as said, or what the engine would take. nvme_bytes: what may be used of
    NVMe; None: there is none. whole_bytes: weights, gradients and optimizer state. beside_bytes: of host memory, what
    everything but the budget takes with this batch. room_bytes: the largest budget that leaves so much. problem: why it
    does not fit (then only ``run`` and ``smallest_bytes`` may be known). smallest_bytes: the least budget with which it
    can be placed. device_enough_bytes: the least device budget of a rank with which it can, where that is what is too
    small. with_disk: how it fits with more NVMe; None where it fits, or where NVMe is not what is missing.
    order: in which micro-batches are run. other_order: the same in the other one, where there are several micro-batches
    and both orders.
    steps_of_endurance: optimizer steps after which the node's drives are worn out; None where nothing is known of that.
    """

    subject: Subject
    machine: MachineSpec
    config: Config
    capacity_bytes: int
    nvme_bytes: int | None
    whole_bytes: int
    room_bytes: int
    beside_bytes: int
    smallest_bytes: int | None
    run: DryRun | None
    blocks: BlockPlan | None
    memory: MemoryEstimate | None
    step: StepEstimate | None
    problem: str
    device_enough_bytes: int | None = None
    with_disk: WithDisk | None = None
    order: AccumulationOrder = AccumulationOrder.HORIZONTAL
    other_order: InOrder | None = None

    @property
    def fits(self) -> bool:
        return not self.problem

    def of_node(self, nbytes: int) -> int:
        """What all ranks of a node take together, where each takes ``nbytes``."""
        return nbytes * self.machine.ranks_per_node

    @property
    def leaving_bytes(self) -> int:
        """What activations that leave have of one rank's host budget; ``capacity_bytes`` is without it."""
        return _leaving(self.machine, self.config).part_bytes

    @property
    def node_host_bytes(self) -> int:
        return self.of_node(self.memory.host_bytes) if self.memory is not None else 0

    @property
    def node_nvme_bytes(self) -> int:
        return self.of_node(self.memory.nvme_bytes) if self.memory is not None else 0

    @property
    def steps_of_endurance(self) -> float | None:
        if self.step is None or not self.machine.nvme_endurance_bytes:
            return None
        written = self.of_node(self.step.times.written_bytes + self.step.activation_bytes)
        return self.machine.nvme_endurance_bytes / written if written else math.inf


def estimate(
    subject: Subject,
    machine: MachineSpec,
    config: Config,
    *,
    time_ops: Callable[[DryRun], OpTimes] | None = None,
    progress: Report = silent,
) -> Estimate:
    """Plan ``subject`` on ``machine``: memory by tier, and a step on the simulated clock.

    Without budgets in ``config`` they are those that ``offload_context`` would take of this machine.
    With several ranks it is the plan that each of them makes.

    Args:
        time_ops: gives seconds of a run's operators as measured; it is asked only where the model fits.
        progress: is told of what takes long.

    Raises:
        ConfigError: the configuration asks for what the machine does not have. UnsupportedError: or for what several
            ranks cannot do.
        UsageError: the model cannot be run on shapes.
    """
    link = planned_link(machine, config)
    order, other = _orders(config)
    planner = Planner(subject.module, config, link, on_device=machine.has_device)
    bandwidths, (capacity, nvme) = machine.bandwidths(), budgets(machine, config)
    device = machine.device_budget_bytes(config.device_budget)
    blocks, problem, device_enough = None, "", None
    try:
        blocks = planner.plan(capacity_bytes=capacity, nvme_bytes=nvme, bandwidths=bandwidths, device_bytes=device)
    except PlacementError as error:
        ranks = machine.ranks_per_node, machine.ranks_per_device
        problem = str(of_host(error, *ranks, capacity, planner.budget_of))
        device_enough = error.enough_bytes if isinstance(error, DevicePlacementError) else None
    # The units of a run in a budget without end serve as well where there is no plan: its activations are the same.
    known = blocks or planner.plan(capacity_bytes=UNBOUNDED_BYTES, nvme_bytes=None, bandwidths=bandwidths)
    runs = RunsByOrder(subject, known, planner.types, config, machine, progress)
    run = runs.of(order)
    gone = _leaving(machine, config)
    on: dict[str, Any] = {"process_bytes": machine.process_bytes, "has_device": machine.has_device, "leaving": gone}
    on["shared_bytes"] = shared_gradient_bytes(subject.module, planner.types)
    beside = _beside(known, run, together_in(config, order), on)
    room = max(0, machine.host_memory_bytes // machine.ranks_per_node - beside)
    found = Estimate(
        subject=subject,
        machine=machine,
        config=config,
        capacity_bytes=capacity,
        nvme_bytes=nvme,
        whole_bytes=sum(block.nbytes for block in known.placement.blocks),
        room_bytes=room,
        beside_bytes=beside,
        smallest_bytes=_smallest(planner, nvme, bandwidths),
        run=run,
        blocks=None,
        memory=None,
        step=None,
        problem=problem if room else NO_ROOM,
        device_enough_bytes=device_enough,
        order=order,
    )
    if blocks is None and room:
        return replace(found, with_disk=_with_disk(planner, found, bandwidths))
    if blocks is None or not found.fits:
        return found
    memory = estimate_memory(blocks, run, together=together_in(config, order), **on)
    problem = gone.problem(memory.left_bytes) or _too_much(memory, machine, room)
    found = replace(found, blocks=blocks, memory=memory, problem=problem)
    if run is None:
        return found
    op_times = time_ops(run) if time_ops is not None and not problem else None
    usual = _in_order(order, found, blocks, run, op_times, on)
    others = None
    if other is not None and not problem and (in_other := runs.of(other)) is not None:
        others = _in_order(other, found, blocks, in_other, op_times, on)
    return replace(found, memory=usual.memory, step=usual.step, other_order=others)


def _in_order(
    order: AccumulationOrder,
    found: Estimate,
    blocks: BlockPlan,
    run: DryRun,
    op_times: OpTimes | None,
    on: dict[str, Any],
) -> InOrder:
    """``on``: what else :func:`estimate_memory` is told."""
    config, tokens = found.config, found.subject.batch.tokens
    step = estimate_usual_step(blocks, run, found.machine, config, order, tokens=tokens, op_times=op_times)
    together = together_in(config, order)
    memory = estimate_memory(blocks, run, together=together, written=step.ever_written, overlap=step.step_overlap, **on)
    if memory.left_nvme_bytes:
        passes = config.gradient_accumulation_steps // together
        step = step.moving_activations(passes * memory.left_nvme_bytes, found.machine.bandwidths())
    return InOrder(order, step, memory)


def _orders(config: Config) -> tuple[AccumulationOrder, AccumulationOrder | None]:
    """The order of micro-batches that the configuration says, or that of a program which calls backward itself; and the
    other one, where there is one."""
    vertical, horizontal = AccumulationOrder.VERTICAL, AccumulationOrder.HORIZONTAL
    said = config.accumulation_order
    order = vertical if said is vertical else horizontal
    other = horizontal if said is vertical else vertical
    return order, other if config.gradient_accumulation_steps > 1 else None


NO_ROOM = (
    "activations, processes and the largest layer leave nothing of host memory for the model; use smaller batches or "
    "activation checkpointing"
)


def budgets(machine: MachineSpec, config: Config) -> tuple[int, int | None]:
    """Bytes of host memory for blocks and of NVMe (None: there is none) that one rank may use: its part of what a node
    has.

    Raises:
        ConfigError: the configuration asks for what the machine does not have.
    """
    each = machine.ranks_per_node
    capacity = _host_bytes(machine, config) - _leaving(machine, config).part_bytes
    if config.nvme_budget and not machine.nvme_bytes:
        raise ConfigError(
            f"an NVMe budget of {format_bytes(config.nvme_budget)}, but the machine has no NVMe: measure a disk "
            "(--measure DIRECTORY), or give the machine file nvme_bytes"
        )
    if not machine.nvme_bytes or not may_use_nvme(config):
        return capacity, None
    free = machine.nvme_bytes
    if config.nvme_budget is not None and config.nvme_budget > free:
        raise ConfigError(
            f"an NVMe budget of {format_bytes(config.nvme_budget)}, but the machine has {format_bytes(free)}; lower it"
        )
    return capacity, (unsaid_nvme_bytes(free) if config.nvme_budget is None else config.nvme_budget) // each


def _host_bytes(machine: MachineSpec, config: Config) -> int:
    """The host budget of one rank, activations included."""
    each = machine.ranks_per_node
    if config.host_budget is None:
        return unsaid_host_bytes(max(0, machine.host_memory_bytes // each - machine.process_bytes))
    return config.host_budget // each


def _leaving(machine: MachineSpec, config: Config) -> Leaving:
    """Which activations leave where they are made."""
    host_bytes, ranks = _host_bytes(machine, config), machine.ranks_per_node
    return leaving(config, host_bytes, has_device=machine.has_device, ranks=ranks)


def surely_too_large(subject: Subject, machine: MachineSpec, config: Config) -> bool:
    """Whether memory and NVMe together cannot hold the model at any rates."""
    capacity, nvme = budgets(machine, config)
    planner = Planner(subject.module, config, planned_link(machine, config), on_device=machine.has_device)
    whole = planner.plan(capacity_bytes=UNBOUNDED_BYTES, nvme_bytes=None, bandwidths=machine.bandwidths())
    return sum(block.nbytes for block in whole.placement.blocks) > capacity + (nvme or 0)


def _beside(blocks: BlockPlan, run: DryRun | None, together: int, on: dict[str, Any]) -> int:
    """Memory that everything but the budget takes. ``together``, ``on``: as of :func:`estimate_memory`."""
    empty = replace(blocks, placement=replace(blocks.placement, capacity_bytes=0), largest_bytes=0)
    others = estimate_memory(empty, run, together=together, **on)
    return sum(row.pageable for row in others.rows if row.name not in _MODEL_ROWS) + blocks.largest_bytes


_MODEL_ROWS = (
    "weights", "gradients", "optimizer state", "slots for state", "prefetch window", WHOLE_COPIES, ON_THEIR_WAY
)  # fmt: skip


def _smallest(planner: Planner, nvme_bytes: int | None, bandwidths: Bandwidths) -> int | None:
    try:
        return planner.smallest_capacity(nvme_bytes=nvme_bytes, bandwidths=bandwidths)
    except PlacementError:
        return None


def _with_disk(planner: Planner, found: Estimate, bandwidths: Bandwidths) -> WithDisk | None:
    """See ``Estimate.with_disk``."""
    budget = found.capacity_bytes
    smallest = _smallest(planner, UNBOUNDED_BYTES, bandwidths)
    if smallest is None:
        return None
    least, most = parse_bytes(at_least(smallest)), parse_bytes(at_most(found.room_bytes))
    if least > most:
        return None
    if budget < smallest or budget > found.room_bytes:
        budget = min(max(budget, least), most)
    try:
        planner.plan(capacity_bytes=budget, nvme_bytes=0, bandwidths=bandwidths)
    except PlacementError as error:
        needed = error.enough_nvme_bytes or 0
        return WithDisk(budget, needed) if needed > (found.nvme_bytes or 0) else None
    return None


def _too_much(memory: MemoryEstimate, machine: MachineSpec, room: int) -> str:
    host = memory.host_bytes * machine.ranks_per_node
    if host > machine.host_memory_bytes:
        return (
            f"the node's host memory must hold {host} bytes but has {machine.host_memory_bytes}: next to activations "
            f"and processes there is room for a host_budget of {room} bytes"
        )
    on_device = memory.device_bytes * machine.ranks_per_device
    if machine.has_device and on_device > machine.device_memory_bytes:
        return f"a device must hold {on_device} bytes but has {machine.device_memory_bytes}"
    return ""


def largest_model(
    machine: MachineSpec, config: Config, batch: Batch, *, checkpointing: bool = True, vocabulary: int = 32_000
) -> Estimate:
    """The largest decoder that fits, of the usual proportions (layers grow with the square root of the hidden size).

    Raises:
        ConfigError: not even the smallest one fits.
    """
    positive_integer("vocabulary", vocabulary)

    def attempt(heads: int) -> Estimate:
        hidden = heads * HEADS_OF
        layers = max(2, round(math.sqrt(hidden) * 0.7))
        shape = DecoderShape(layers, hidden, heads, vocabulary)
        subject = from_shape(shape, batch, checkpointing=checkpointing)
        found = estimate(subject, machine, config)
        if config.host_budget is None and not found.fits and found.room_bytes > found.capacity_bytes:
            return estimate(subject, machine, replace(config, host_budget=found.room_bytes))
        return found

    heads = _largest(lambda number: attempt(number).fits, 512)
    if heads is None:
        raise ConfigError(f"not even a decoder with one head of {HEADS_OF} fits: {attempt(1).problem}")
    return attempt(heads)


def _largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest number from 1 to ``most`` that fits, where all below it do."""
    if not fits(1):
        return None
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
