"""Optimizer state of paged parameters out of their pieces, and back into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.native import cpu_adam
from deepoffload.optim.relayout import add_fields
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS, PieceView, to_fp32
from deepoffload.optim.threads import num_threads
from deepoffload.params.edits import look_for_edits
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.passage import Passage
from deepoffload.params.torch_private import get_data, outside_user_modes
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
    return _runs(pager, in_turn(pager, held.keys() | leads), held, leads)


def _runs(
    pager: Pager,
    pieces: Iterable[tuple[StatePiece, list[PieceSegment]]],
    held: Mapping[ParamHandle, Arrays],
    leads: Set[ParamHandle],
) -> Iterator[StateRun]:
    for piece, parts in pieces:
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


class ArrayCopy(NamedTuple):
    """Where an array goes.

    Attributes:
        field: of the pieces; "" for what completes the weight.
        target: has the parameter's shape and stride.
    """

    field: str
    target: Tensor


def copy_arrays(
    pager: Pager, handle: ParamHandle, copies: Mapping[str, ArrayCopy], elements: slice | None = None
) -> None:
    """Copy arrays of one parameter in fp32, and what completes the weight to its master, in one pass over the pieces.

    Args:
        copies: by key.
        elements: those that are wanted, in the order of the weight's memory, where the targets have no others; all
            when not given. The pieces of a rank hold what it owns.

    Raises:
        UsageError: the optimizer does not keep one of the arrays any more.
    """
    held = {handle: {key: copy.field for key, copy in copies.items() if copy.field}}
    leads = set() if all(copy.field for copy in copies.values()) else {handle}
    copied = dict.fromkeys(copies, 0)
    begin, end = (0, handle.numel) if elements is None else (elements.start, elements.stop)
    with pager.lock:  # all of them are of one step
        for run in _runs(pager, pieces_of(pager, {handle}), held, leads):
            for key, values in run.arrays.items():
                if key in copies:
                    copied[key] += run.numel
                    _copy_run(run, values, key, copies[key], begin)
        for key, copy in copies.items():
            if not copy.field and handle.master_stale:
                copy_own_master(handle, key, copy.target, elements)
            elif copied[key] != end - begin:
                raise UsageError(f"{key} of {handle.name}: the optimizer does not keep this array any more")


def _copy_run(run: StateRun, values: Tensor, key: str, copy: ArrayCopy, begin: int) -> None:
    """``begin``: the element with which the target begins."""
    address = copy.target.data_ptr() + (run.start - begin) * copy.target.element_size()
    if copy.field:
        to_fp32(values, run.arrays.get(key + SCALE_SUFFIX), address)
    elif not run.handle.master_stale:
        cpu_adam.copy(address, values.data_ptr(), values.nbytes, num_threads())


def copy_own_master(handle: ParamHandle, key: str, target: Tensor, wanted: slice | None = None) -> None:
    """What completes a weight that the program wrote: it is its own master. ``wanted``: as of :func:`copy_arrays`."""
    tensor = handle.tensor
    if key == "remainder" or tensor is None:
        target.zero_()
        return
    with SHIELD:
        handle.pager.pin(handle)
        try:
            weight = get_data(tensor)
            if wanted is None:
                target.copy_(weight)
            elif wanted.start < wanted.stop:
                run = PieceSegment(0, wanted.start, wanted.stop - wanted.start, 0)
                target.copy_(elements(weight, handle, run, weight.dtype))
        finally:
            handle.pager.unpin(handle)


def with_own_master(pager: Pager, handles: Set[ParamHandle]) -> set[ParamHandle]:
    """Those of which the pieces hold a remainder that is not all zero, or a master that is not the weight's value."""
    halves = {handle for handle in handles if LAYOUTS.get(handle.dtype) in MASTER_PART_KEYS}
    found = set()
    for run in iterate_state(pager, {}, halves):
        if run.handle in found or run.handle.master_stale:
            continue
        if any(is_own_master(lead, values) for lead, values in run.arrays.items()):
            found.add(run.handle)
    return found


def is_own_master(lead: str, values: Tensor) -> bool:
    """Whether a remainder is not all zero, or a master is not the weight's value."""
    return bool(values.any()) if lead == "remainder" else not torch.equal(values, values.half().float())


def write_state(
    pager: Pager, given: Mapping[ParamHandle, Mapping[str, Tensor]], arrays: Mapping[ParamHandle, Arrays]
) -> None:
    """Put arrays, and a remainder or master where given, into the pieces. Everything has the parameter's shape.

    The tensors may have any type and stride, and may be mapped files: no more than a piece of them is copied at a time.
    """
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
                mine = given[handle]
                for key, field in arrays[handle].items():
                    if key in mine:
                        values = elements(mine[key], handle, part, torch.float32)
                        view.store_fp32(field, part, values.data_ptr())
                if lead is not None and lead in mine:
                    values = elements(mine[lead], handle, part, _lead_dtype(lead))
                    cpu_adam.copy(view.lead(part), values.data_ptr(), values.nbytes, num_threads())
    for handle, state in given.items():
        if "remainder" in state or "master" in state:
            handle.master_stale = False


def _lead_dtype(lead: str) -> torch.dtype:
    return torch.int16 if lead == "remainder" else torch.float32


def pieces_of(pager: Pager, handles: Set[ParamHandle]) -> Iterator[tuple[StatePiece, list[PieceSegment]]]:
    """Pieces that hold any of ``handles``, with their segments, in the order of the units."""
    one = next(iter(handles)).unit if len(handles) == 1 else None
    for unit in list(pager.units) if one is None else (one,):
        if any(handle in handles for handle in unit.handles):
            look_for_edits([unit])
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


def elements(value: Tensor, handle: ParamHandle, part: PieceSegment, dtype: torch.dtype) -> Tensor:
    """A run of a tensor that has the parameter's shape, in the order of the parameter's memory: flat, on the CPU. Of a
    flat tensor that has this rank's elements alone (``state_shards``) it is a run, too.

    Raises:
        ValueError: it has another shape.
    """
    if value.shape != handle.shape:
        own = slice(0, 0) if handle.cut is None else handle.cut.own_elements()
        if handle.cut is not None and value.shape == (own.stop - own.start,):
            run = value[part.start - own.start : part.start - own.start + part.numel]
            return run.to(device="cpu", dtype=dtype).contiguous()
        raise ValueError(f"state of {handle.name} has shape {tuple(value.shape)}, the parameter {tuple(handle.shape)}")
    with outside_user_modes():
        if value.stride() == tuple(handle.stride):
            run = value.as_strided((part.numel,), (1,), value.storage_offset() + part.start)
        else:
            order = sorted(range(value.dim()), key=lambda dim: -handle.stride[dim] if handle.shape[dim] != 1 else 1)
            run = _flat_run(value.permute(order), part.start, part.numel)
        return run.to(device="cpu", dtype=dtype).contiguous()


def _flat_run(value: Tensor, start: int, numel: int) -> Tensor:
    """Elements of a tensor in row-major order; no more than these are copied."""
    if value.is_contiguous():
        return value.view(-1)[start : start + numel]
    if value.dim() == 1:
        return value[start : start + numel]
    row = value[0].numel()
    runs = []
    while numel:
        first, skipped = divmod(start, row)
        whole_rows = 0 if skipped else numel // row
        if whole_rows:
            runs.append(value[first : first + whole_rows].reshape(-1))
        else:
            runs.append(_flat_run(value[first], skipped, min(numel, row - skipped)))
        start += runs[-1].numel()
        numel -= runs[-1].numel()
    return runs[0] if len(runs) == 1 else torch.cat(runs)
