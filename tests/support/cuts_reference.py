"""How a model is cut and placed, block by block: every cut is made of real blocks, placed, and taken back. Slow, and
what ``deepoffload.runtime.choice`` must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from deepoffload.config import Config, GradientDtype
from deepoffload.config.units import format_bytes
from deepoffload.copies.scratch import scratch_bytes
from deepoffload.device import Tier
from deepoffload.errors import DevicePlacementError, PlacementError
from deepoffload.memory.arena import common_size
from deepoffload.native.aio import round_up
from deepoffload.optim.state import pieces_per_unit
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.choice import Room
from deepoffload.runtime.compute_types import ComputeTypes, compute_types
from deepoffload.runtime.construct import Assembly, parts_to_fill
from deepoffload.runtime.cuts import PIECES_PER_BUDGET, UNITS_PER_BUDGET, grain_above, grain_below
from deepoffload.runtime.draft import UnitDraft, draft_unit
from deepoffload.runtime.plan import dry_pager, state_format
from deepoffload.runtime.unit_finder import find_units
from deepoffload.schedule.cost_model import BlockKind, StepOverlap, Workload
from deepoffload.schedule.nvme_room import set_up_nvme_bytes
from deepoffload.schedule.placement import BlockSpec, Placement
from tests.support.placing import plan_placement


class Cutting:
    """One way to cut: the units of one limit, with blocks that can be declared and taken back."""

    def __init__(self, roots: Sequence[nn.Module], config: Config, types: ComputeTypes, grain_bytes: int) -> None:
        pager, gradients, handles = dry_pager(*roots)
        gradients.in_fp32 = config.gradient_dtype is GradientDtype.FP32
        self.assembly = Assembly(pager, gradients, grain_bytes // PIECES_PER_BUDGET, types, state_format(config))
        self.drafts: list[UnitDraft] = []
        self.windows: list[tuple[str, nn.Module]] = []
        by_tensor = {id(handle.tensor): handle for handle in handles}
        drafted: set[int] = set()
        for root in roots:
            found = find_units(root, grain_bytes // UNITS_PER_BUDGET, self.assembly.target_nbytes)
            self.windows.extend(found.windows)
            for unit in found.units:
                mine: list[ParamHandle] = []
                for _, param in unit.params:
                    if id(param) in by_tensor and id(param) not in drafted:
                        drafted.add(id(param))
                        mine.append(by_tensor[id(param)])
                if mine:
                    self.drafts.append(draft_unit(pager, types, unit.name, mine))
        self.assembly.typical_bytes = common_size(draft.nbytes for draft in self.drafts)

    def kind(self) -> object:
        typical, limit_bytes = self.assembly.typical_bytes, self.assembly.piece_bytes
        sizes = sorted({draft.nbytes for draft in self.drafts}) if typical is None else [typical]
        units = tuple(len(draft.handles) for draft in self.drafts)
        return units, tuple(name for name, _ in self.windows), tuple(pieces_per_unit(n, limit_bytes) for n in sizes)

    def placed(self, config: Config, room: Room) -> Placement:
        for draft in self.drafts:
            self.assembly.make(draft)
        try:
            return self._place(config, room)
        finally:
            for draft in self.drafts:
                self.assembly.discard(draft)

    def _place(self, config: Config, room: Room) -> Placement:
        unit_of = {id(handle.tensor): draft.unit for draft in self.drafts for handle in draft.handles}
        events = [
            sum(u.weights.room_bytes for u in {unit_of[id(p)] for p in module.parameters() if id(p) in unit_of})
            for _, module in self.windows
        ]
        most = max(events, default=0)
        if room.device_bytes and most > room.device_bytes:
            said = f"device_budget is {format_bytes(room.device_bytes)} ({room.device_bytes} bytes), but a call of "
            name = self.windows[events.index(most)][0] or "the model"
            needs = f"{name} needs {most} bytes of weights on the device at once; raise it to at least {most} bytes"
            raise DevicePlacementError(said + needs, most)
        away = self._on_device(room.device_bytes) if config.offload_optimizer is Tier.DEVICE else set()
        specs = [
            BlockSpec(block.id, block.name, block.kind, round_up(block.room_bytes), draft.unit.index)
            for draft in self.drafts
            for block in draft.unit.blocks()
            if block.id not in away
        ]
        limits = {BlockKind.WEIGHT: config.offload_param, BlockKind.STATE: config.offload_optimizer}
        kept_kinds = {kind for kind, tier in limits.items() if tier is not None and tier is not Tier.NVME}
        return plan_placement(
            specs,
            capacity_bytes=room.capacity_bytes,
            nvme_capacity_bytes=room.nvme_bytes,
            event_weight_bytes=most,
            bandwidths=room.bandwidths,
            workload=Workload(config.gradient_accumulation_steps, config.step_overlap or StepOverlap.DEFERRED),
            num_parameters=sum(h.numel for draft in self.drafts for h, _ in draft.trained) or None,
            keep=frozenset(spec.id for spec in specs if spec.kind in kept_kinds),
            set_up_bytes=self._set_up_bytes(can_leave=room.nvme_bytes is not None),
            spare_nvme_bytes=self._relayout_bytes() if config.optimizer is None else 0,
            set_up_nvme_bytes=set_up_nvme_bytes(
                room.capacity_bytes, self._set_up_bytes(can_leave=False), self._largest_bytes()
            ),
        )

    def _relayout_bytes(self) -> int:
        """The state of the unit that has most of it, of those that train 16-bit weights."""
        units = [draft.unit for draft in self.drafts if any(dtype.itemsize == 2 for _, dtype in draft.trained)]
        return max((sum(piece.block.room_bytes for piece in unit.pieces) for unit in units), default=0)

    def _largest_bytes(self) -> int:
        """Of the blocks that are there while the model is set up."""
        units = [draft.unit for draft in self.drafts]
        registered = [round_up(handle.nbytes) for draft in self.drafts for handle in draft.handles]
        return max(
            *registered,
            *(unit.weights.room_bytes for unit in units),
            *(piece.block.room_bytes for unit in units for piece in unit.pieces),
        )

    def _on_device(self, device_bytes: int) -> set[int]:
        units = [draft.unit for draft in self.drafts]
        gradients = max((unit.gradients.room_bytes for unit in units if unit.gradients is not None), default=0)
        left = device_bytes - sum(unit.weights.room_bytes for unit in units) - gradients - scratch_bytes(device_bytes)
        kept: set[int] = set()
        for unit in units:
            blocks = [piece.block for piece in unit.pieces]
            if unit.gradients is not None:
                blocks.append(unit.gradients)
            nbytes = sum(block.room_bytes for block in blocks)
            if unit.pieces and nbytes <= left:
                left -= nbytes
                kept |= {block.id for block in blocks}
        return kept

    def _set_up_bytes(self, *, can_leave: bool) -> int:
        if can_leave:
            return max(
                draft.unit.weights.room_bytes
                + round_up(max(handle.nbytes for handle in draft.handles))
                + max((piece.block.room_bytes for piece in draft.unit.pieces), default=0)
                for draft in self.drafts
            )
        registered = sum(round_up(handle.nbytes) for draft in self.drafts for handle in draft.handles)
        return max(accumulate((n for draft in self.drafts for n in _set_up_changes(draft)), initial=registered))


def _set_up_changes(draft: UnitDraft) -> Iterator[int]:
    """By how many bytes the memory in use changes, in order, while the unit is filled and nothing can leave."""
    yield draft.unit.weights.room_bytes
    made: set[int] = set()
    for handle, dtype in zip(draft.handles, draft.dtypes, strict=True):
        held = round_up(handle.nbytes)
        for piece, part in parts_to_fill(draft.unit, handle, dtype):
            if piece.block.id not in made:
                made.add(piece.block.id)
                yield piece.block.room_bytes
            left = round_up(max(part.start * handle.itemsize, 1))
            yield left - held
            held = left
        yield -held


def reference_choice(roots: Sequence[nn.Module], config: Config, room: Room) -> tuple[Placement, list[UnitDraft]]:
    """The placement and the units of the cut that is chosen.

    Raises:
        PlacementError: no cut fits.
    """
    types = compute_types(config, roots)
    refusals: list[tuple[PlacementError, Cutting]] = []
    seen: set[object] = set()
    for grain_bytes in _grains(roots, types, room.capacity_bytes):
        cutting = Cutting(roots, config, types, grain_bytes)
        if cutting.kind() in seen:
            continue
        seen.add(cutting.kind())
        try:
            return cutting.placed(config, room), cutting.drafts
        except PlacementError as error:
            refusals.append((error, cutting))
    if all(isinstance(error, DevicePlacementError) for error, _ in refusals):
        on_device = min((error for error, _ in refusals), key=_needs)
        with_more = replace(room, device_bytes=int(_needs(on_device)))
        again = [
            (_refusal(cutting, config, with_more, on_device), cutting)
            for error, cutting in refusals
            if _needs(error) == with_more.device_bytes
        ]
        least = _least(again, config, with_more)
        raise least if _said_both(least) else PlacementError(f"{on_device}. {least}", least.enough_bytes)
    on_host = [(error, cutting) for error, cutting in refusals if not isinstance(error, DevicePlacementError)]
    raise _least(on_host, config, room)


def _refusal(cutting: Cutting, config: Config, room: Room, otherwise: PlacementError) -> PlacementError:
    """Why a cut is refused; ``otherwise`` is raised where it is not."""
    try:
        cutting.placed(config, room)
    except PlacementError as error:
        return error
    raise otherwise


def _least(refusals: list[tuple[PlacementError, Cutting]], config: Config, room: Room) -> PlacementError:
    """The refusal that asks for NVMe alone, or else for least memory, and of NVMe if with so much memory that is too
    small."""
    refusal, cutting = min(refusals, key=lambda tried: _needs_budgets(tried[0]))
    if refusal.enough_bytes is not None:
        try:
            cutting.placed(config, replace(room, capacity_bytes=refusal.enough_bytes))
        except PlacementError as error:
            said, _, table = str(refusal).partition("\n")
            why = f"{said} With so much memory NVMe is too small: {str(error).splitlines()[0]}\n{table}"
            return PlacementError(why, refusal.enough_bytes, enough_nvme_bytes=error.enough_nvme_bytes)
    return refusal


def _needs_budgets(error: PlacementError) -> tuple[float, float]:
    """Of memory and NVMe; where NVMe alone is too small, no more memory than there is."""
    if error.enough_nvme_bytes is not None:
        return 0.0, error.enough_nvme_bytes
    return _needs(error), math.inf


def _said_both(error: PlacementError) -> bool:
    return "With so much memory" in str(error)


def _needs(error: PlacementError) -> float:
    return math.inf if error.enough_bytes is None else error.enough_bytes


def _grains(roots: Sequence[nn.Module], types: ComputeTypes, capacity_bytes: int) -> Iterator[int]:
    _, _, handles = dry_pager(*roots)
    sizes = [h.numel * types.of(h.tensor).itemsize for h in handles if h.tensor is not None]
    least = grain_below(max(sizes))
    most = max(least, grain_below(2 * PIECES_PER_BUDGET * sum(sizes)))
    first = min(max(grain_below(capacity_bytes), least), most)
    finer = first
    while finer > least:
        yield finer
        finer = grain_below(finer - 1)
    yield finer
    coarser = grain_above(first)
    while coarser <= most:
        yield coarser
        coarser = grain_above(coarser)
