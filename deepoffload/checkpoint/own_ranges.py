"""The elements of a stored tensor that one of several ranks owns: which they are, and how they get into its shard.

A part of a stored tensor is a view of a weight (:class:`~deepoffload.checkpoint.expressions.Part`). A rank owns
consecutive elements of the weight's memory. Mostly the order of the file is that of memory, and what it owns is a few
long runs of the file. Where it is not, as in a transposed weight, its elements are picked by their numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.checkpoint.expressions import Part
from deepoffload.checkpoint.file_set import FileSet
from deepoffload.params.pager import Pager
from deepoffload.params.shards import OwnedRun
from deepoffload.params.unit import ParamHandle

RUN_BYTES_MIN = 512
"""A tensor whose memory order is so different from that of the file that shorter runs would result is picked element
by element."""

PICKED_NUMEL = 1 << 18
"""Elements whose numbers are worked out at a time: 2 MiB of these."""


class FileRun(NamedTuple):
    """Elements that follow each other in memory and in the file: numbers of the first one in memory and in the part."""

    element: int
    position: int
    numel: int


def inner_run(view: Tensor) -> tuple[int, tuple[int, ...]]:
    """How many elements of the row-major order lie next to each other, and the shape of the dimensions outside."""
    inner, dim = 1, view.dim()
    while dim and (view.shape[dim - 1] == 1 or view.stride(dim - 1) == inner):
        inner *= view.shape[dim - 1]
        dim -= 1
    return max(1, inner), tuple(view.shape[:dim])


def is_scattered(view: Tensor) -> bool:
    """Whether its elements lie in runs of memory that are too short to be moved one by one."""
    inner, _ = inner_run(view)
    return inner * view.element_size() < RUN_BYTES_MIN and inner < view.numel()


def runs_of(part: Part) -> Iterator[FileRun]:
    """A part as runs of memory, in the order of the file."""
    view, start, stop = part.view, part.start, part.stop
    inner, outer = inner_run(view)
    for number in range(start // inner, -(-stop // inner)):
        begin, end = max(start, number * inner), min(stop, (number + 1) * inner)
        element = part.offset_numel + _offset_of(number, outer, view.stride()) + begin - number * inner
        yield FileRun(element, begin - start, end - begin)


def _offset_of(number: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Where run ``number`` of the outer dimensions begins, in elements."""
    offset = 0
    for size, step in zip(reversed(shape), reversed(stride[: len(shape)]), strict=True):
        number, index = divmod(number, size)
        offset += index * step
    return offset


def owned_run(handle: ParamHandle) -> OwnedRun | None:
    """What this rank owns of a weight that is cut; None where that is nothing."""
    if handle.cut is None:
        raise RuntimeError(f"{handle.name} is not cut for several ranks")
    return handle.cut.run()


def owned_runs(part: Part, owned: OwnedRun) -> Iterator[FileRun]:
    """:func:`runs_of`, as far as a rank owns the elements."""
    for element, position, numel in runs_of(part):
        first, last = max(element, owned.start), min(element + numel, owned.start + owned.numel)
        if first < last:
            yield FileRun(first, position + first - element, last - first)


class Picked(NamedTuple):
    """Some elements of a part that a rank owns: their numbers in its run, and in the part."""

    elements: Tensor
    positions: Tensor


def owned_elements(part: Part, owned: OwnedRun) -> Iterator[Picked]:
    """What a rank owns of a part whose elements are scattered, in the order of the file."""
    view = part.view
    for begin in range(part.start, part.stop, PICKED_NUMEL):
        number = torch.arange(begin, min(part.stop, begin + PICKED_NUMEL), device="cpu")
        position, element = number - part.start, torch.full_like(number, part.offset_numel - owned.start)
        for size, step in zip(reversed(view.shape), reversed(view.stride()), strict=True):
            element += number % size * step
            number = number // size
        mine = (element >= 0) & (element < owned.numel)
        if bool(mine.any()):
            yield Picked(element[mine], position[mine])


class OwnGather(NamedTuple):
    """What this rank owns of a part whose elements lie scattered in memory, and where the part goes."""

    handle: ParamHandle
    owned: OwnedRun
    part: Part
    file: str
    position: int

    def put(self, files: FileSet, address: int) -> None:
        """``address``: of the resident block."""
        run = shard_run(self.handle, self.owned, address)
        size = run.element_size()
        for elements, positions in owned_elements(self.part, self.owned):
            values = run[elements]
            cuts = (positions.diff() != 1).nonzero().view(-1) + 1
            bounds = [0, *cuts.tolist(), positions.numel()]
            for first, last in zip(bounds[:-1], bounds[1:], strict=True):
                files.put_tensor(self.file, self.position + int(positions[first]) * size, values[first:last])


def shard_run(handle: ParamHandle, owned: OwnedRun, address: int) -> Tensor:
    """The elements of a rank's run of a weight, flat, where its shard is resident at ``address``."""
    nbytes = owned.numel * handle.dtype.itemsize
    held = (ctypes.c_uint8 * nbytes).from_address(address + owned.shard_offset)
    return torch.frombuffer(held, dtype=handle.dtype)


@contextmanager
def changing_shard(handle: ParamHandle, owned: OwnedRun | None) -> Iterator[Tensor | None]:
    """This rank's run of a weight, held in memory to be overwritten; None where it owns nothing. That is no edit by the
    program, and the weight is its own master until one is loaded. What tensors show follows by :func:`show_again`."""
    pager, block = handle.pager, handle.block
    assert block is not None, "it is cut"
    with pager.lock:
        if handle.unit is not None:
            handle.unit.owner.changed()  # edits from before count for nothing
        pager.memory.settle(block)
        if owned is None:
            yield None
        else:
            pager.tiers.acquire(block)
            try:
                pager.tiers.will_change(block)
                yield shard_run(handle, owned, pager.tiers.address(block))
            finally:
                pager.tiers.release(block)
        handle.count_update()  # graphs that have kept the old values must not go on
        handle.master_stale = True


def show_again(pager: Pager) -> None:
    """Let all tensors of a pager show what the ranks store now: every rank has finished changing it. Serves the others
    meanwhile."""
    with pager.lock:
        for unit in pager.units:
            if unit.owner.changed():  # of what has not been loaded
                pager.memory.will_change(unit.weights)
            pager.memory.settle(unit.weights)
            pager.memory.refresh(unit.weights)
    pager.memory.finish_rewrites()
