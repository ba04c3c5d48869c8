"""From a model to its placement: units, blocks, and which of them stay in memory. No bytes are moved.

The engine plans with this before it moves anything, and the estimators predict with the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from torch.nn.parameter import is_lazy

from deepoffload.config import Config, GradientDtype
from deepoffload.config.units import format_bytes
from deepoffload.device import Tier
from deepoffload.errors import DevicePlacementError, PlacementError
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.optim.checks import STATE_DTYPES
from deepoffload.optim.gradients import Gradients
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.slot import dense_stride
from deepoffload.params.unit import PLAIN_FORMAT, ParamHandle, StateFormat
from deepoffload.params.use_order import UseOrder
from deepoffload.runtime.compute_types import compute_types
from deepoffload.runtime.construct import Assembly, UnitDraft
from deepoffload.runtime.cuts import Cut, Cutter
from deepoffload.schedule.cost_model import Bandwidths, BlockKind, Workload
from deepoffload.schedule.placement import BlockSpec, Placement, plan_placement

NO_DISK = Bandwidths(2e9, 2e9, 2e9, 2e10)
"""Stands where there is no NVMe path: nothing is moved, so any rate gives the same placement."""

STATE_FIELDS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("exp_avg_sq",),
    "sgd": ("exp_avg",),
}
"""Arrays of each optimizer's state, by what the pieces call them."""


def state_format(config: Config) -> StateFormat:
    """What optimizer state is planned with: the format that the configuration's optimizer needs, or two fp32 arrays
    where it names none. The first step lays pieces of another format out again."""
    said = config.optimizer
    if said is None:
        return PLAIN_FORMAT
    kind = "adam" if said.type == "adamw" else said.type
    fields = STATE_FIELDS[kind]
    if kind == "adam" and said.params.get("amsgrad"):
        fields = (*fields, "max_exp_avg_sq")
    if kind == "sgd" and not said.params.get("momentum"):
        return PLAIN_FORMAT  # none; pieces that are never used take neither memory nor disk
    in_bf16 = said.params.get("fp32_optimizer_states") is False
    return StateFormat(fields, STATE_DTYPES["bf16" if in_bf16 else str(said.params.get("state_dtype", "fp32"))])


@dataclass(frozen=True)
class ModelPlan:
    """A model cut into units, the modules that are to have windows (with their names), those that were split, the
    placement, the blocks of optimizer state that live on a device and are no part of it, and how finely the model was
    cut: as for a budget of ``grain_bytes``."""

    assembly: Assembly
    drafts: list[UnitDraft]
    windows: list[tuple[str, nn.Module]]
    outer: list[tuple[str, nn.Module]]
    placement: Placement
    on_device: list[Block]
    grain_bytes: int


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
) -> ModelPlan:
    """Cut ``roots`` into units and place them in ``capacity_bytes`` of memory and ``nvme_bytes`` of NVMe (None: no
    path). Declares the blocks with the pager's tier manager.

    The model is cut as finely as the budget suggests. Where that needs more than there is, because small blocks waste
    more of their pages or large ones do not fit, other cuts are tried: a budget is accepted if any cut fits, so
    each larger one is, too, and what a refusal names is the least that is accepted.

    ``device_bytes``: of a device's memory, 0 where the CPU computes. It must hold the weights of one call; finer cuts
    are tried where it does not. What all weights leave of it is for optimizer state, where the configuration keeps that
    on the device.

    Raises:
        DevicePlacementError: the host's budgets could run this model, but the device's cannot.
        PlacementError: the budgets cannot run this model; the message carries the table. ``enough_bytes`` is the least
            memory that can, None where it is NVMe that is too small.
        UsageError: ``keep_fp32`` names something that the model does not have.
    """
    gradients.in_fp32 = config.gradient_dtype is GradientDtype.FP32
    types = compute_types(config, roots)
    cutter = Cutter(pager, gradients, types, state_format(config), roots, _alive(pager, handles))

    def placed(cut: Cut, capacity_bytes: int) -> ModelPlan:
        return _placed(config, cut, capacity_bytes, nvme_bytes, bandwidths, device_bytes)

    refusals: list[tuple[PlacementError, Cut]] = []
    too_coarse: list[tuple[DevicePlacementError, Cut]] = []
    for cut in cutter.cuts(capacity_bytes):
        try:
            return placed(cut, capacity_bytes)
        except DevicePlacementError as error:
            too_coarse.append((error, cut))
        except PlacementError as error:
            refusals.append((error, cut))
    on_device: DevicePlacementError | None = None
    if not refusals:  # no cut is fine enough for the device: with the least that one needs there, does the host do?
        on_device = min((error for error, _ in too_coarse), key=_needs)
        device_bytes = int(_needs(on_device))
        for cut in (cut for error, cut in too_coarse if _needs(error) == device_bytes):
            try:
                placed(cut, capacity_bytes)
            except PlacementError as error:
                refusals.append((error, cut))
            else:
                cut.take_back()
                raise on_device
    refusal, cut = min(refusals, key=lambda tried: _needs(tried[0]))
    if refusal.enough_bytes is not None:
        try:
            placed(cut, refusal.enough_bytes)
        except PlacementError as error:
            raise _both(refusal, error) from None
        cut.take_back()
    raise refusal if on_device is None else PlacementError(f"{on_device}. {refusal}", refusal.enough_bytes)


def _placed(
    config: Config,
    cut: Cut,
    capacity_bytes: int,
    nvme_bytes: int | None,
    bandwidths: Bandwidths,
    device_bytes: int,
) -> ModelPlan:
    """The plan with this cut, its blocks declared; when it is refused, nothing stays declared."""
    cut.declare()
    try:
        if device_bytes:
            _check_calls(cut, device_bytes)
        kept = _state_on_device(cut.drafts, device_bytes) if config.offload_optimizer is Tier.DEVICE else []
        on_device = {block.id for block in kept}
        placement = _place(config, cut.drafts, cut.windows, on_device, capacity_bytes, nvme_bytes, bandwidths)
    except BaseException:
        cut.take_back()
        raise
    return ModelPlan(cut.assembly, cut.drafts, cut.windows, cut.outer, placement, kept, cut.grain_bytes)


def _check_calls(cut: Cut, device_bytes: int) -> None:
    """Raise where a call of a module takes more weights at once than the device may hold."""
    shown = window_bytes(cut.drafts, cut.windows, shown=True)
    name, nbytes = max(shown, key=lambda window: window[1], default=("", 0))
    if nbytes > device_bytes:
        raise DevicePlacementError(
            f"device_budget is {format_bytes(device_bytes)} ({device_bytes} bytes), but a call of "
            f"{name or 'the model'} needs {nbytes} bytes of weights on the device at once; raise it to at least "
            f"{nbytes} bytes",
            nbytes,
        )


def _both(memory: PlacementError, nvme: PlacementError) -> PlacementError:
    """Memory is too small, and with as much as would do NVMe is, too."""
    said, _, table = str(memory).partition("\n")
    return PlacementError(f"{said} With so much memory NVMe is too small: {str(nvme).splitlines()[0]}\n{table}")


def _alive(pager: Pager, handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Those whose parameters still exist; the bytes of others are given back."""
    alive = []
    for handle in handles:
        if handle.tensor is not None:
            alive.append(handle)
        elif handle.block is not None:
            pager.tiers.remove(handle.block)
    return alive


def _needs(error: PlacementError) -> float:
    return math.inf if error.enough_bytes is None else error.enough_bytes


def weights_on_device_bytes(drafts: Iterable[UnitDraft]) -> int:
    """Device memory that all weights take, and the largest block of gradients, of which one is there when looked at."""
    units = [draft.unit for draft in drafts]
    gradients = [unit.gradients.shown_room_bytes for unit in units if unit.gradients is not None]
    return sum(unit.weights.shown_room_bytes for unit in units) + max(gradients, default=0)


def _state_on_device(drafts: Sequence[UnitDraft], device_bytes: int) -> list[Block]:
    """The state of as many units, first to last, as there is room for next to the weights."""
    left = device_bytes - weights_on_device_bytes(drafts)
    kept: list[Block] = []
    for draft in drafts:
        blocks = [piece.block for piece in draft.unit.pieces]
        nbytes = sum(block.shown_room_bytes for block in blocks)
        if nbytes <= left:
            left -= nbytes
            kept += blocks
    return kept


def _place(
    config: Config,
    drafts: list[UnitDraft],
    windows: list[tuple[str, nn.Module]],
    on_device: set[int],
    capacity_bytes: int,
    nvme_bytes: int | None,
    bandwidths: Bandwidths,
) -> Placement:
    specs: list[BlockSpec] = []
    trained = 0
    for draft in drafts:
        unit = draft.unit
        mine = [block for block in unit.blocks() if block.id not in on_device]
        specs += [BlockSpec(b.id, b.name, b.kind, round_up(b.room_bytes), unit.index) for b in mine]
        trained += sum(handle.numel for handle in draft.trained)
    limits = {BlockKind.WEIGHT: config.offload_param, BlockKind.STATE: config.offload_optimizer}
    kept_kinds = {kind for kind, tier in limits.items() if tier is not None and tier is not Tier.NVME}
    event_bytes = max((nbytes for _, nbytes in window_bytes(drafts, windows)), default=0)
    return plan_placement(
        specs,
        capacity_bytes=capacity_bytes,
        nvme_capacity_bytes=nvme_bytes,
        event_weight_bytes=event_bytes,
        bandwidths=bandwidths,
        workload=Workload(config.gradient_accumulation_steps, config.step_overlap),
        num_parameters=trained or None,
        keep=frozenset(spec.id for spec in specs if spec.kind in kept_kinds),
        set_up_bytes=_set_up_bytes(drafts, can_leave=nvme_bytes is not None),
    )


def _set_up_bytes(drafts: Sequence[UnitDraft], *, can_leave: bool) -> int:
    """What must be in memory at once while the parameters move, one by one, into their units."""
    if can_leave:
        return max((draft.set_up_bytes() for draft in drafts), default=0)
    registered = sum(round_up(handle.nbytes) for draft in drafts for handle in draft.handles)
    changes = (change for draft in drafts for change in draft.set_up_changes())
    return max(accumulate(changes, initial=registered))


def window_bytes(
    drafts: Sequence[UnitDraft], windows: Sequence[tuple[str, nn.Module]], *, shown: bool = False
) -> Iterator[tuple[str, int]]:
    """Each window's name, and the host memory that the weights of one call of its module take. ``shown``: the memory of
    their copies instead."""
    unit_of = {id(handle.tensor): draft.unit for draft in drafts for handle in draft.handles}
    for name, module in windows:
        units = {unit_of[id(p)].index: unit_of[id(p)] for p in module.parameters() if id(p) in unit_of}
        blocks = [unit.weights for unit in units.values()]
        yield name, sum(round_up(block.shown_room_bytes if shown else block.room_bytes) for block in blocks)


def dry_pager(*roots: nn.Module) -> tuple[Pager, Gradients, list[ParamHandle]]:
    """A pager that has no memory and a handle for each parameter, which the parameters know nothing of."""
    graphs = OpenGraphs()
    order = UseOrder(graphs, prefetch=False)
    pager = Pager(TierManager(Arena(PAGE_BYTES, lends=False), None, order), order, graphs, prefetch=False)
    params = {id(param): (name, param) for root in roots for name, param in root.named_parameters()}
    handles = [
        ParamHandle(pager, name, param, param.dtype, dense_stride(param))
        for name, param in params.values()
        if not is_lazy(param) and param.numel() and not param.is_complex()
    ]
    return pager, Gradients(pager), handles


def refusal_of(
    roots: Sequence[nn.Module],
    config: Config,
    *,
    capacity_bytes: int,
    nvme_bytes: int | None,
    bandwidths: Bandwidths,
    device_bytes: int = 0,
) -> PlacementError | None:
    """Why models cannot run, as :func:`plan_model` says it; None for ones that can."""
    pager, gradients, handles = dry_pager(*roots)
    try:
        plan_model(
            pager,
            gradients,
            config,
            roots,
            handles,
            capacity_bytes=capacity_bytes,
            nvme_bytes=nvme_bytes,
            bandwidths=bandwidths,
            device_bytes=device_bytes,
        )
    except PlacementError as error:
        return error
    return None
