"""Units whose weights stand in a checkpoint as the model wants them: their blocks are read from there.

A block then consists of runs of whole pages of the file, one after the other. So a tensor lies in memory as it lies in
the file, to a page, and direct transfers need no copy. That is also how it lies where a library maps the file: plain
PyTorch computes with the same alignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepoffload.io.extents import ExtentPart, SourceExtent
from deepoffload.io.mapped_origin import MappedOrigins, SourceRange
from deepoffload.memory.block import can_hide
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.params.slot import dense_stride
from deepoffload.params.torch_private import get_data, outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit

GAP_BYTES = 64 << 10
"""What lies between two tensors of a unit in the file is read with them up to this size: one request less."""

RUNS_LATER = 2
"""A block has room for so many runs of files: one is usual, two where files are cut inside the unit. All units have it,
so that layers of the same sizes take the same room: one that is a page larger would not fit where another was."""


@dataclass(frozen=True)
class Backing:
    """Where tensors lie in a block that a checkpoint backs.

    offsets: of each tensor, in the block. nbytes: what the block takes; the same for tensors of the same sizes
    at any place in a file.
    """

    offsets: tuple[int, ...]
    nbytes: int
    extent: SourceExtent


def backing_of(names: Sequence[str], ranges: Sequence[SourceRange]) -> Backing | None:
    """The block of tensors with these names, which lie in ``ranges``. None where two of them lie in the same bytes:
    only one could be written to."""
    order = sorted(range(len(ranges)), key=lambda index: (ranges[index].number, ranges[index].offset))
    offsets = [0] * len(ranges)
    runs: list[tuple[int, int, int]] = []  # file, first byte of the first page, end
    lengths: list[int] = []  # of each run, from its first tensor on
    begin, end_before = 0, 0
    for index in order:
        number, offset, nbytes = ranges[index].number, ranges[index].offset, ranges[index].nbytes
        page = offset // PAGE_BYTES * PAGE_BYTES
        if runs and runs[-1][0] == number and offset < end_before:
            return None
        if runs and runs[-1][0] == number and page <= round_up(end_before) + GAP_BYTES:
            page = runs[-1][1]
            runs[-1] = (number, page, offset + nbytes)
            lengths[-1] += offset + nbytes - end_before
        else:
            begin += round_up(runs[-1][2]) - runs[-1][1] if runs else 0
            runs.append((number, page, offset + nbytes))
            lengths.append(nbytes)
        end_before = offset + nbytes
        offsets[index] = begin + offset - page
    pieces = tuple(ExtentPart(number, start, round_up(end) - start) for number, start, end in runs)
    extent = SourceExtent(sum(piece.nbytes for piece in pieces), pieces, tuple(names))
    return Backing(tuple(offsets), _nbytes_in_runs(sum(lengths), max(len(runs), min(len(ranges), RUNS_LATER))), extent)


def _nbytes_in_runs(nbytes: int, count: int) -> int:
    """What a block of so many bytes of tensors takes. Each run has less than two pages in which it begins and ends."""
    return round_up(nbytes) + (2 * count - 1) * PAGE_BYTES


def nbytes_for_later(nbytes: int, count: int) -> int:
    """What a block takes whose ``count`` tensors of ``nbytes`` a checkpoint may come to have later."""
    return _nbytes_in_runs(nbytes, min(count, RUNS_LATER))


def back_unit(unit: Unit, ranges: Mapping[ParamHandle, SourceRange]) -> bool:
    """Drop the bytes of a unit: a checkpoint has those that its parameters are to have. False where it does not have
    all of them, where they do not lie there as a block wants them, or where the program holds views of what would go;
    nothing is changed then."""
    block, handles = unit.weights, unit.handles
    if not all(handle in ranges for handle in handles):
        return False
    backing = backing_of([handle.name for handle in handles], [ranges[handle] for handle in handles])
    if backing is None or backing.extent.nbytes > block.nbytes:
        return False
    tiers = handles[0].pager.tiers
    with tiers.lock, outside_user_modes():
        other_memory = any(handle.given() or handle.displaced() for handle in handles)
        if block.leases or unit.pending is not None or other_memory or not can_hide(unit.owner):
            return False
        tiers.discard(block)
        if block.extent is not None and tiers.space is not None:
            tiers.space.free(block.extent)
        tiers.transfers.back(block, backing.extent)
        for handle, offset in zip(handles, backing.offsets, strict=True):
            handle.origin = ranges[handle]
            handle.bind_at(block, offset)
            handle.rewritten()
            handle.count_update()  # graphs that have kept the old values must not go on
    return True


def find_origin(origins: MappedOrigins | None, param: Tensor) -> SourceRange | None:
    """Which bytes of a checkpoint a parameter shows that comes to a model: all of them, in the order of memory."""
    if origins is None or param.device.type != "cpu" or dense_stride(param) != param.stride():
        return None
    with outside_user_modes():
        data = get_data(param)
        found = origins.find(data.data_ptr(), data.nbytes)
    return None if found is None or found.offset % param.itemsize else found


def backing_if_any(handles: Sequence[ParamHandle], dtypes: Sequence[torch.dtype]) -> Backing | None:
    """The block of a unit, where a checkpoint still has all of it in the types that it computes in."""
    ranges = []
    for handle, dtype in zip(handles, dtypes, strict=True):
        if handle.origin is None or dtype is not handle.dtype:
            return None
        ranges.append(handle.origin)
    return backing_of([handle.name for handle in handles], ranges)
