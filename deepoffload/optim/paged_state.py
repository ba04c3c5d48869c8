"""Optimizer state of paged parameters out of their pieces, and back into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.optim.relayout import add_fields
from deepoffload.optim.state import MASTER_PART_KEYS, PieceView
from deepoffload.optim.threads import num_threads
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece

Arrays = Mapping[str, str]
"""Keys of ``optimizer.state`` to fields of ``Segment``."""


def read_state(
    pager: Pager, held: Mapping[ParamHandle, Arrays], others: Set[ParamHandle]
) -> dict[ParamHandle, dict[str, Tensor]]:
    """Copies of what the pieces hold, in ordinary memory, piece by piece.

    Args:
        held: parameters whose arrays are wanted, with ``"remainder"`` (bf16) or ``"master"`` (fp16) in addition.
        others: parameters of which no step was taken: all they can have is a remainder that is not all zero, or a
            master that is not the weight's value.
    """
    found: dict[ParamHandle, dict[str, Tensor]] = {handle: {} for handle in held}
    for piece, parts in _pieces_of(pager, held.keys() | others):
        with _resident(pager, piece):
            view = PieceView(pager.tiers, piece)
            lead = MASTER_PART_KEYS.get(piece.kind)
            for part in parts:
                handle = piece.handles[part.tensor]
                mine = found.setdefault(handle, {})
                wanted = ((k, f) for k, f in held.get(handle, {}).items() if f in piece.format.fields)
                for key, field in wanted:
                    target = _room(mine, key, torch.float32, handle)
                    view.load_fp32(field, part, target.data_ptr() + part.start * 4)
                if lead == "remainder" and handle.master_stale:
                    mine.setdefault(lead, torch.zeros(handle.shape, dtype=torch.int16, device="cpu"))
                elif lead is not None and not handle.master_stale:
                    target = _room(mine, lead, _lead_dtype(lead), handle)
                    size = target.element_size()
                    address = target.data_ptr() + part.start * size
                    cpu_adam.copy(address, view.lead(part), part.numel * size, num_threads())
    for handle in others:
        mine = found.get(handle, {})
        remainder, master = mine.get("remainder"), mine.get("master")
        if remainder is not None and bool(remainder.any()):
            found[handle] = {"remainder": remainder}
        elif master is not None and not torch.equal(master, master.half().float()):
            found[handle] = {"master": master}
        else:
            found.pop(handle, None)
    return found


def write_state(
    pager: Pager, given: Mapping[ParamHandle, Mapping[str, Tensor]], arrays: Mapping[ParamHandle, Arrays]
) -> None:
    """Put arrays, and a remainder or master where given, into the pieces. Everything has the parameter's shape."""
    source = _StateSource()
    for unit in list(pager.units):
        fields = {h: tuple(arrays[h].values()) for h in unit.handles if h in arrays and h in given}
        if any(fields.values()):
            with pager.lock:
                add_fields(pager.tiers, unit, fields)
    for piece, parts in _pieces_of(pager, given.keys()):
        with _resident(pager, piece):
            pager.tiers.will_change(piece.block)
            view = PieceView(pager.tiers, piece)
            lead = MASTER_PART_KEYS.get(piece.kind)
            for part in parts:
                handle = piece.handles[part.tensor]
                for key, field in arrays[handle].items():
                    if key in given[handle]:
                        view.store_fp32(field, part, source.address(given[handle][key], torch.float32, handle, part))
                if lead is not None and lead in given[handle]:
                    dtype = _lead_dtype(lead)
                    address = source.address(given[handle][lead], dtype, handle, part)
                    nbytes = part.numel * dtype.itemsize
                    cpu_adam.copy(view.lead(part), address, nbytes, num_threads())
    for handle, state in given.items():
        if "remainder" in state or "master" in state:
            handle.master_stale = False


def _lead_dtype(lead: str) -> torch.dtype:
    return torch.int16 if lead == "remainder" else torch.float32


def _pieces_of(pager: Pager, handles: Set[ParamHandle]) -> Iterator[tuple[StatePiece, list[PieceSegment]]]:
    """Pieces that hold any of ``handles``, with their segments, in the order of the units."""
    for unit in list(pager.units):
        if any(handle in handles for handle in unit.handles):
            if unit.owner.changed():  # a weight that the program wrote has another master
                pager.memory.will_change(unit.weights)
            for piece in unit.pieces:
                parts = [part for part in piece.layout.segments if piece.handles[part.tensor] in handles]
                if parts:
                    yield piece, parts


@contextmanager
def _resident(pager: Pager, piece: StatePiece) -> Iterator[None]:
    with pager.lock:
        pager.tiers.acquire(piece.block)
        try:
            yield
        finally:
            pager.tiers.release(piece.block)
            if pager.memory.keeps(piece.block):
                pager.memory.keep(piece.block)  # back to where it lives


def _room(mine: dict[str, Tensor], key: str, dtype: torch.dtype, handle: ParamHandle) -> Tensor:
    if key not in mine:
        with outside_user_modes():
            mine[key] = torch.empty_strided(handle.shape, handle.stride, dtype=dtype)
    return mine[key]


class _StateSource:
    """Given arrays in the order and type of the pieces; a converted copy lives until the next parameter's turn."""

    def __init__(self) -> None:
        self._handle: ParamHandle | None = None
        self._ready: dict[int, Tensor] = {}

    def address(self, value: Tensor, dtype: torch.dtype, handle: ParamHandle, part: PieceSegment) -> int:
        if self._handle is not handle:
            self._handle, self._ready = handle, {}
        if id(value) not in self._ready:
            self._ready[id(value)] = _arranged(value, dtype, handle)
        return self._ready[id(value)].data_ptr() + part.start * dtype.itemsize


def _arranged(value: Tensor, dtype: torch.dtype, handle: ParamHandle) -> Tensor:
    if value.dtype is dtype and value.stride() == handle.stride and value.device.type == "cpu":
        return value
    with outside_user_modes():
        return torch.empty_strided(handle.shape, handle.stride, dtype=dtype).copy_(value)
