"""Optimizer state of paged parameters out of their pieces, and back into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.optim.relayout import add_fields
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import MASTER_PART_KEYS, PieceView, to_fp32
from deepoffload.optim.threads import num_threads
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.passage import Passage
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece

Arrays = Mapping[str, str]
"""Keys of ``optimizer.state`` to fields of ``Segment``."""


class StateRun(NamedTuple):
    """A run of one parameter's state as its piece holds it: elements ``start`` to ``start + numel`` in the order of the
    weight's memory.

    ``arrays``, by the key of ``optimizer.state``, are flat views of the piece: fp32, bf16, or 8-bit codes (int8,
    uint8) with their scales (fp32, one per 256 elements) under the key with ``_absmax`` behind it. ``"remainder"``
    (int16) or ``"master"`` (fp32) complete the weight to its fp32 value. They are valid until the next run.
    """

    handle: ParamHandle
    start: int
    numel: int
    arrays: Mapping[str, Tensor]


def iterate_state(pager: Pager, held: Mapping[ParamHandle, Arrays], leads: Set[ParamHandle]) -> Iterator[StateRun]:
    """What the pieces hold, piece by piece, each resident while its runs are looked at.

    Args:
        held: parameters whose arrays are wanted. An array that the pieces have no room for yet is left out.
        leads: parameters whose remainder or master is wanted. The caller knows which of them are stale.
    """
    for piece, parts in in_turn(pager, held.keys() | leads):
        with resident_piece(pager, piece):
            view = PieceView(pager.tiers, piece)
            lead = MASTER_PART_KEYS.get(piece.kind)
            for part in parts:
                handle = piece.handles[part.tensor]
                arrays = {}
                for key, field in held.get(handle, {}).items():
                    if field in piece.format.fields:
                        arrays.update(view.stored(key, field, part))
                if lead is not None and handle in leads:
                    arrays[lead] = view.stored_lead(part)
                yield StateRun(handle, part.start, part.numel, arrays)


def read_state(
    pager: Pager, held: Mapping[ParamHandle, Arrays], others: Set[ParamHandle]
) -> dict[ParamHandle, dict[str, Tensor]]:
    """Copies of what the pieces hold, in ordinary memory, with arrays in fp32.

    Args:
        held: parameters whose arrays are wanted, with ``"remainder"`` (bf16) or ``"master"`` (fp16) in addition.
        others: parameters of which no step was taken: all they can have is a remainder that is not all zero, or a
            master that is not the weight's value.
    """
    found: dict[ParamHandle, dict[str, Tensor]] = {handle: {} for handle in held}
    for run in iterate_state(pager, held, held.keys() | others):
        mine = found.setdefault(run.handle, {})
        for key in held.get(run.handle, {}):
            if key in run.arrays:
                target = _room(mine, key, torch.float32, run.handle)
                to_fp32(run.arrays[key], run.arrays.get(key + SCALE_SUFFIX), target.data_ptr() + run.start * 4)
        for lead in MASTER_PART_KEYS.values():
            if lead not in run.arrays:
                continue
            if lead == "remainder" and run.handle.master_stale:
                mine.setdefault(lead, torch.zeros(run.handle.shape, dtype=torch.int16, device="cpu"))
            elif not run.handle.master_stale:
                target = _room(mine, lead, _lead_dtype(lead), run.handle)
                address = target.data_ptr() + run.start * target.element_size()
                cpu_adam.copy(address, run.arrays[lead].data_ptr(), run.arrays[lead].nbytes, num_threads())
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
    for piece, parts in in_turn(pager, given.keys()):
        with resident_piece(pager, piece):
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


def pieces_of(pager: Pager, handles: Set[ParamHandle]) -> Iterator[tuple[StatePiece, list[PieceSegment]]]:
    """Pieces that hold any of ``handles``, with their segments, in the order of the units."""
    for unit in list(pager.units):
        if any(handle in handles for handle in unit.handles):
            if unit.owner.changed():  # a weight that the program wrote has another master
                pager.memory.will_change(unit.weights)
            for piece in unit.pieces:
                parts = [part for part in piece.layout.segments if piece.handles[part.tensor] in handles]
                if parts:
                    yield piece, parts


def in_turn(pager: Pager, handles: Set[ParamHandle]) -> Iterator[tuple[StatePiece, list[PieceSegment]]]:
    """:func:`pieces_of`, where each piece is looked at before the next one is asked for: the disk works on those to
    come and those before meanwhile."""
    pieces = list(pieces_of(pager, handles))
    passage = Passage(pager, (piece.block for piece, _ in pieces))
    for piece, parts in pieces:
        passage.at(piece.block)
        yield piece, parts
    passage.end()


@contextmanager
def resident_piece(pager: Pager, piece: StatePiece, *, load: bool = True) -> Iterator[None]:
    """Bring a piece to host memory and keep it there for as long as the context lasts.

    Args:
        load: False when all of it is going to be overwritten.
    """
    with pager.lock:
        pager.tiers.acquire(piece.block, load=load)
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
