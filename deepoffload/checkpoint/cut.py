"""From blocks to files: which bytes of each block go where in a checkpoint, and what of it lies in no block."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.checkpoint.expressions import Opener, Part, slabs
from deepoffload.checkpoint.file_layout import PlannedFile
from deepoffload.checkpoint.file_set import FileSet
from deepoffload.checkpoint.own_ranges import OwnGather, is_scattered, owned_run, owned_runs, runs_of
from deepoffload.checkpoint.weights import WINDOW_BYTES, Target, WeightPlan
from deepoffload.memory.block import Block
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle


class BlockSpan(NamedTuple):
    """``nbytes`` of a block, from ``offset`` on, and where they go."""

    offset: int
    nbytes: int
    file: str
    position: int


class Gather(NamedTuple):
    """A part of a stored tensor whose elements lie scattered in memory."""

    handle: ParamHandle
    part: Part
    file: str
    position: int

    def put(self, files: FileSet, address: int) -> None:
        """``address``: of the resident block."""
        handle, (_, view, start, stop) = self.handle, self.part
        begin = address + handle.form.offset_stored
        held = (ctypes.c_uint8 * handle.form.nbytes_stored).from_address(begin)
        values = torch.frombuffer(held, dtype=handle.dtype).as_strided(handle.shape, handle.stride)
        position = self.position
        for slab in slabs(self.part.of(values), start, stop, max(1, WINDOW_BYTES // view.element_size())):
            run = slab.contiguous().view(-1)
            files.put_tensor(self.file, position, run)
            position += run.nbytes


class BlockSpans:
    """Puts the bytes of one block, which come in order, into files: its
    :class:`~deepoffload.memory.snapshots.BlockSink`."""

    def __init__(self, files: FileSet, spans: Iterable[BlockSpan], gathers: Sequence[Gather | OwnGather]) -> None:
        self.whole = bool(gathers)
        self._files = files
        self._spans = sorted(spans)
        self._gathers = gathers
        self._first = 0

    def put(self, start: int, address: int, nbytes: int) -> None:
        end = start + nbytes
        while self._first < len(self._spans) and sum(self._spans[self._first][:2]) <= start:
            self._first += 1
        for span in itertools.islice(self._spans, self._first, None):
            if span.offset >= end:
                break
            begin, stop = max(start, span.offset), min(end, span.offset + span.nbytes)
            if begin < stop:
                self._files.put(span.file, span.position + begin - span.offset, address + begin - start, stop - begin)
        for gather in self._gathers:
            gather.put(self._files, address)


class MemoryRun(NamedTuple):
    """Values that lie in no block; ``pieces()`` gives them one after the other, contiguous and on the CPU."""

    file: str
    position: int
    pieces: Callable[[], Iterator[Tensor]]


@dataclass
class CutContent:
    """What a checkpoint is made of, by place."""

    spans: dict[Block, list[BlockSpan]] = field(default_factory=dict)
    gathers: dict[Block, list[Gather | OwnGather]] = field(default_factory=dict)
    in_memory: list[MemoryRun] = field(default_factory=list)

    def add_span(self, block: Block, span: BlockSpan) -> None:
        if span.nbytes:
            self.spans.setdefault(block, []).append(span)

    def add_tensor(self, file: str, position: int, values: Tensor) -> None:
        self.in_memory.append(MemoryRun(file, position, lambda: iter((values.cpu().contiguous().view(-1),))))

    def copy_memory(self) -> None:
        """The program may change from now on what lies in no block."""
        for number, run in enumerate(self.in_memory):
            values = [piece.clone() for piece in run.pieces()]
            self.in_memory[number] = run._replace(pieces=values.__iter__)

    def is_of(self, block: Block) -> bool:
        return block in self.spans or block in self.gathers

    def sink(self, block: Block, files: FileSet) -> BlockSpans:
        return BlockSpans(files, self.spans.get(block, ()), self.gathers.get(block, ()))


def add_weights(
    content: CutContent,
    plan: WeightPlan,
    targets: Mapping[Opener, Target],
    files: Sequence[PlannedFile],
    *,
    with_ordinary: bool = True,
) -> None:
    """What the stored tensors of a model are made of; of weights that are cut for several ranks, what this one owns.

    Args:
        targets: what each opener of the plan opens.
        with_ordinary: False: another rank writes what is not paged.
    """
    for file in files:
        for name, (_, position) in file.places().items():
            for part in plan.expressions.parts(plan.tensors[name]):
                handle = targets[part.source.open]
                nbytes = (part.stop - part.start) * part.view.element_size()
                block = handle.block if isinstance(handle, ParamHandle) else None
                if isinstance(handle, ParamHandle) and block is not None and handle.cut is not None:
                    _add_owned(content, handle, block, part, file.name, position)
                elif isinstance(handle, ParamHandle) and block is not None and not block.forms:
                    _add_part(content, handle, block, part, file.name, position)
                elif with_ordinary:
                    content.in_memory.append(MemoryRun(file.name, position, _Slabs(part)))
                position += nbytes


class _Slabs:
    """The elements of a part, read when they are asked for."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __call__(self) -> Iterator[Tensor]:
        with self._part.opened() as view:
            window = max(1, WINDOW_BYTES // view.element_size())
            for slab in slabs(view, self._part.start, self._part.stop, window):
                yield slab.cpu().contiguous().view(-1)


def _add_part(content: CutContent, handle: ParamHandle, block: Block, part: Part, file: str, position: int) -> None:
    size = part.view.element_size()
    if is_scattered(part.view) or part.view.dtype is not handle.dtype:
        content.gathers.setdefault(block, []).append(Gather(handle, part, file, position))
        return
    for run in runs_of(part):
        offset = handle.form.offset_stored + run.element * size
        content.add_span(block, BlockSpan(offset, run.numel * size, file, position + run.position * size))


def _add_owned(content: CutContent, handle: ParamHandle, block: Block, part: Part, file: str, position: int) -> None:
    owned, size = owned_run(handle), handle.dtype.itemsize
    if owned is None:
        return
    if is_scattered(part.view):
        content.gathers.setdefault(block, []).append(OwnGather(handle, owned, part, file, position))
        return
    for run in owned_runs(part, owned):
        offset = owned.shard_offset + (run.element - owned.start) * size
        content.add_span(block, BlockSpan(offset, run.numel * size, file, position + run.position * size))


# -- the moment --------------------------------------------------------------------------------------------------------


@contextmanager
def held_still(pagers: Sequence[Pager]) -> Iterator[None]:
    """Nothing of the models changes for as long as the context lasts: the memory's locks are held. What the program has
    written is noticed, and lies in host memory.

    Updates that are still to come stay so, but for those that would also make or lay out state: what a checkpoint holds
    of such a unit is not known before. These are made now.

    Raises:
        IoFailure: a transfer that this needed failed.
    """
    with ExitStack() as locks:
        for pager in pagers:
            locks.enter_context(pager.lock)
        for pager in pagers:
            for unit in list(pager.units):
                if unit.pending is not None and unit.pending.blocks_to_change(unit) is None:
                    pager.catch_up(unit)
                if unit.owner.changed():  # a weight that the program wrote has another master
                    pager.memory.will_change(unit.weights)
                if unit.pending is None:
                    pager.memory.settle(unit.weights)
        yield
