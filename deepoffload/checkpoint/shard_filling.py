"""What one rank reads of a stored tensor into the part of a weight that it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.checkpoint.expressions import Part
from deepoffload.checkpoint.own_ranges import FileRun, is_scattered, owned_elements, owned_runs
from deepoffload.checkpoint.plain_files import FileTensor
from deepoffload.checkpoint.plain_reader import PlainReader
from deepoffload.memory.block import Block
from deepoffload.params.shards import OwnedRun
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.runtime.building import BuildingMemory


class OwnPart(NamedTuple):
    """What this rank stores of a weight: ``numel`` elements, in the order of memory, from ``start`` on.

    Attributes:
        address: of an element among these, counted in the whole weight, while the block is resident.
    """

    handle: ParamHandle
    block: Block
    start: int
    numel: int
    address: Callable[[int], int]

    def stored(self, begin: int, numel: int) -> Tensor:
        """Some of these elements, flat. The block must be resident."""
        arena = self.handle.pager.tiers.arena
        offset = self.address(begin) - arena.address
        return torch.frombuffer(arena.buffer, dtype=self.handle.dtype, count=numel, offset=offset)

    @property
    def run(self) -> OwnedRun:
        """These elements, where only their numbers matter."""
        return OwnedRun(0, self.start, self.numel, 0, 0)


def own_part(handle: ParamHandle) -> OwnPart | None:
    """What this rank stores of a weight that is going to be overwritten; None where that is all of it. Of one that
    belongs to a model that several ranks build, it is put away."""
    block, memory = handle.block, handle.memory
    if block is None:
        return None
    if handle.cut is not None:
        run = handle.cut.run()
        start, numel = (0, 0) if run is None else (run.start, run.numel)
        return OwnPart(handle, block, start, numel, handle.element_address)
    kept = memory.part_to_load(block) if isinstance(memory, BuildingMemory) else None
    if kept is None:
        return None
    tiers, itemsize = handle.pager.tiers, handle.itemsize
    begin = kept.start // itemsize

    def address(element: int) -> int:
        return tiers.address(kept.block) + (element - begin) * itemsize

    return OwnPart(handle, kept.block, begin, kept.nbytes // itemsize, address)


def needed_bytes(tensor: FileTensor, part: Part, own: OwnPart | None) -> int:
    """What this rank reads of a part, at most."""
    numel = part.stop - part.start
    if own is not None and not is_scattered(part.view):
        numel = sum(run.numel for run in owned_runs(part, own.run))
    return numel * tensor.dtype.itemsize


def fill_shard(reader: PlainReader, tensor: FileTensor, part: Part, own: OwnPart, start: int) -> None:
    """Write what this rank stores of a part of a weight. ``start``: the part's first element in the file.

    Raises:
        IoFailure: the file, or the disk that the weight is on. BudgetError: no room for the block.
    """
    tiers = own.handle.pager.tiers
    if not own.numel:
        return
    tiers.acquire(own.block)
    try:
        tiers.will_change(own.block)
        if is_scattered(part.view):
            _fill_scattered(reader, tensor, part, own, start)
            return
        for run in owned_runs(part, own.run):
            _fill_run(reader, tensor, own, run, start + run.position)
    finally:
        tiers.release(own.block)


def _fill_run(reader: PlainReader, tensor: FileTensor, own: OwnPart, run: FileRun, start: int) -> None:
    """Elements that follow each other in memory as in the file."""
    if own.handle.dtype is tensor.dtype:
        reader.read_into(own.address(run.element), tensor, start, run.numel)
        return
    begin, window = run.element, reader.window_numel(tensor)
    sizes = [min(window, run.numel - at) for at in range(0, run.numel, window)]
    for values in reader.pieces(tensor, start, sizes):
        own.stored(begin, values.numel()).copy_(values)
        begin += values.numel()


def _fill_scattered(reader: PlainReader, tensor: FileTensor, part: Part, own: OwnPart, start: int) -> None:
    """A part whose elements lie in another order in memory than in the file."""
    target = own.stored(own.start, own.numel)
    for elements, positions in owned_elements(part, own.run):
        first, last = int(positions[0]), int(positions[-1])
        values = torch.empty(last + 1 - first, dtype=tensor.dtype, device="cpu")
        reader.read_into(values.data_ptr(), tensor, start + first, values.numel())
        target[elements] = values[positions - first].to(target.dtype)


def store_edits(unit: Unit) -> None:
    """What this rank stores of a unit is up to date: the last step is made, and what the program has written is in."""
    pager = unit.owner.pager
    with pager.lock:
        if unit.owner.changed():
            pager.memory.will_change(unit.weights)
        unit.owner.before_gather()
