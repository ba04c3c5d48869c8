"""From a model to its placement: units, blocks, and which of them stay in memory. No bytes are moved.

The engine plans with this before it moves anything, and the estimators predict with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepoffload.config import Config, GradientDtype
from deepoffload.errors import PlacementError
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block, is_backed
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.optim.checks import STATE_DTYPES
from deepoffload.optim.gradients import Gradients
from deepoffload.params.layout import ALIGNMENT_BYTES
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.ports import PlanningPort, RankPort
from deepoffload.params.slot import dense_stride
from deepoffload.params.unit import PLAIN_FORMAT, ParamHandle, StateFormat
from deepoffload.params.use_order import UseOrder
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.choice import ChosenCut, Room, choose, why_no_guesses
from deepoffload.runtime.compute_types import compute_types
from deepoffload.runtime.construct import Assembly, take_edits
from deepoffload.runtime.cuts import Cutter
from deepoffload.runtime.draft import UnitDraft
from deepoffload.schedule.cost_model import Bandwidths, LinkRates, StepOverlap
from deepoffload.schedule.placement import Placement

NO_DISK = Bandwidths(2e9, 2e9, 2e9, 2e10)
"""Stands where there is no NVMe path: nothing is moved, so any rate gives the same placement."""

STATE_FIELDS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("exp_avg_sq",),
    "sgd": ("exp_avg",),
    "muon": ("momentum_buffer",),
    "rmsprop": ("square_avg",),
}
"""Arrays of each optimizer's state, by what the pieces call them."""


def state_format(config: Config) -> StateFormat:
    """What optimizer state is planned with: the format that the configuration's optimizer needs, or two fp32 arrays
    where it names none, or one of torch's, which keeps its own state. The first step lays pieces of another format out
    again."""
    said = config.optimizer
    kind = None if said is None else "adam" if said.type == "adamw" else said.type
    if said is None or kind not in STATE_FIELDS:
        return PLAIN_FORMAT
    fields = STATE_FIELDS[kind]
    if kind == "adam" and said.params.get("amsgrad"):
        fields = (*fields, "max_exp_avg_sq")
    if kind == "sgd" and not said.params.get("momentum"):
        return PLAIN_FORMAT  # none; pieces that are never used take neither memory nor disk
    in_bf16 = said.params.get("fp32_optimizer_states") is False
    return StateFormat(fields, STATE_DTYPES["bf16" if in_bf16 else str(said.params.get("state_dtype", "fp32"))])


@dataclass(frozen=True)
class ModelPlan:
    """A model cut into units, the placement of their blocks, which are declared, and the blocks of optimizer state that
    live on a device and are no part of it. ``link_rates``: between ranks, where there are several."""

    chosen: ChosenCut
    assembly: Assembly
    placement: Placement
    on_device: list[Block]
    link_rates: LinkRates | None = None

    @property
    def drafts(self) -> list[UnitDraft]:
        return self.chosen.cut.division.drafts

    @property
    def windows(self) -> list[tuple[str, nn.Module]]:
        """Names and modules that are to have windows."""
        return self.chosen.cut.division.windows

    @property
    def outer(self) -> list[tuple[str, nn.Module]]:
        """Names and modules that were split."""
        return self.chosen.cut.division.outer

    def agreed(self, agreement: Agreement) -> ModelPlan:
        """The plan with updates on a guess only where the plans of all ranks have them: one that does not guess would
        let the others wait. Collective."""
        mine = self.placement.step_overlap
        everybody = agreement.gather(mine, "the plan of updates")
        deferring = [rank for rank, overlap in enumerate(everybody) if overlap is StepOverlap.DEFERRED]
        if mine is not StepOverlap.SPECULATIVE or not deferring:
            return self
        updates = f"deferred: rank {deferring[0]} defers"
        change = partial(replace, step_overlap=StepOverlap.DEFERRED, updates=updates)
        return replace(
            self, chosen=replace(self.chosen, placement=change(self.chosen.placement)), placement=change(self.placement)
        )

    def table(self, host_ranks: int, accumulation_steps: int) -> str:
        """The placement for people; with several ranks also what comes from the others."""
        return self.chosen.table(host_ranks, accumulation_steps, self.link_rates)

    @property
    def grain_bytes(self) -> int:
        """The model was cut as finely as for a budget of so many bytes."""
        return self.chosen.cut.grain_bytes


def plan_model(
    pager: Pager,
    gradients: Gradients,
    config: Config,
    roots: Sequence[nn.Module],
    handles: Iterable[ParamHandle],
    *,
    capacity_bytes: int,
    nvme_bytes: int | None,
    bandwidths: Bandwidths,
    device_bytes: int = 0,
    activations: str = "",
) -> ModelPlan:
    """Cut ``roots`` into units and place them in ``capacity_bytes`` of memory and ``nvme_bytes`` of NVMe (None: no
    path). Declares the blocks with the pager's tier manager.

    The model is cut as finely as the budget suggests. Where that needs more than there is, because small blocks waste
    more of their pages or large ones do not fit, other cuts are tried: a budget is accepted if any cut fits, so
    each larger one is, too, and what a refusal names is the least that is accepted.

    ``device_bytes``: of a device's memory, 0 where the CPU computes. It must hold the weights of one call; finer cuts
    are tried where it does not. What all weights leave of it is for optimizer state, where the configuration keeps that
    on the device.

    ``activations``: where these are, for the table; ``capacity_bytes`` is without their part.

    With several ranks ``capacity_bytes`` is also for whole copies, and for gradients on their way.

    Raises:
        DevicePlacementError: the host's budgets could run this model, but the device's cannot.
        PlacementError: the budgets cannot run this model; the message carries the table. ``enough_bytes`` is the least
            memory that can, None where it is NVMe that is too small.
        UsageError: ``keep_fp32`` names something that the model does not have.
    """
    cutter = cutter_of(pager, gradients, config, roots, handles)
    exchange = None if pager.link is None else pager.link.exchange
    why = why_no_guesses(config, on_device=bool(device_bytes))
    choice = choose(cutter, config, Room(capacity_bytes, nvme_bytes, bandwidths, device_bytes, exchange, why))
    choice = replace(choice, placement=replace(choice.placement, activations=activations))
    assembly = cutter.declare(choice.cut)
    blocks = [block for draft in choice.cut.division.drafts for block in draft.unit.blocks()]
    placement = choice.with_ids([block.id for block in blocks])
    on_device = [blocks[number] for number in choice.on_device]
    return ModelPlan(choice, assembly, placement, on_device, None if pager.link is None else pager.link.rates)


def cutter_of(
    pager: Pager, gradients: Gradients, config: Config, roots: Sequence[nn.Module], handles: Iterable[ParamHandle]
) -> Cutter:
    """What cuts ``roots`` as :func:`plan_model` does; nothing is declared.

    Raises:
        UsageError: ``keep_fp32`` names something that the model does not have.
    """
    pager.inference = config.inference  # of one that only plans
    gradients.in_fp32 = config.gradient_dtype is GradientDtype.FP32 or pager.link is not None
    types = compute_types(config, roots)
    alive = _alive(pager, handles)
    for handle in alive:
        _keep_origin(pager, handle)
    return Cutter(pager, gradients, types, state_format(config), roots, alive)


def _keep_origin(pager: Pager, handle: ParamHandle) -> None:
    """Forget where a checkpoint has a parameter that is something else by now."""
    block = handle.block
    if handle.origin is None or block is None:
        return
    if block.resident or handle.given():
        take_edits(pager, handle, block)
    if not is_backed(block):
        handle.origin = None


def _alive(pager: Pager, handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Those whose parameters still exist; the bytes of others are given back."""
    alive = []
    for handle in handles:
        if handle.tensor is not None:
            alive.append(handle)
        elif handle.block is not None:
            pager.tiers.remove(handle.block)
    return alive


def dry_pager(
    *roots: nn.Module,
    others: Iterable[tuple[str, Tensor]] = (),
    link: PlanningPort | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> tuple[Pager, Gradients, list[ParamHandle]]:
    """A pager that has no memory and a handle for each parameter, which the parameters know nothing of. ``others``:
    parameters with names that need not be in ``roots``. ``link``: to the other ranks of those that are planned for.
    ``alignment_bytes``: of the weights (:class:`Pager`)."""
    graphs = OpenGraphs()
    order = UseOrder(graphs, prefetch=False)
    tiers = TierManager(Arena(PAGE_BYTES, lends=False), None, order)
    # a pager that only plans asks for nothing else of its link
    pager = Pager(tiers, order, graphs, prefetch=False, link=cast("RankPort | None", link))
    pager.alignment_bytes = alignment_bytes
    params = {id(param): (name, param) for name, param in others}
    params |= {id(param): (name, param) for root in roots for name, param in root.named_parameters()}
    handles = [
        ParamHandle(pager, name, param, param.dtype, dense_stride(param))
        for name, param in params.values()
        if not is_lazy(param) and param.numel() and not param.is_complex()
    ]
    for handle in handles:
        slot = None if handle.tensor is None else handle.tensor.__dict__.get("_slot")
        handle.origin = slot.origin if isinstance(slot, ParamHandle) else None
    return pager, Gradients(pager), handles


def refusal_of(
    roots: Sequence[nn.Module],
    config: Config,
    *,
    capacity_bytes: int,
    nvme_bytes: int | None,
    bandwidths: Bandwidths,
    device_bytes: int = 0,
    alignment_bytes: int = ALIGNMENT_BYTES,
    link: PlanningPort | None = None,
) -> PlacementError | None:
    """Why models cannot run, as :func:`plan_model` says it; None for ones that can."""
    pager, gradients, handles = dry_pager(*roots, link=link, alignment_bytes=alignment_bytes)
    room = Room(capacity_bytes, nvme_bytes, bandwidths, device_bytes, None if link is None else link.exchange)
    try:
        choose(cutter_of(pager, gradients, config, roots, handles), config, room)
    except PlacementError as error:
        return error
    return None
