"""Which part of a unit each rank owns, and where its elements lie: pure arithmetic, no torch.

With one rank a unit's tensors lie one after the other, each on a cache line. With several, each tensor starts on
:data:`~deepoffload.native.cpu_adam.STATE_BLOCK` elements. Tensors of one type that are all trained, or all frozen, make
a *section*. It is padded at its end and cut in equal ranges, one for each rank::

    whole copy   | section 0: rank 0's range | rank 1's range | section 1: rank 0's range | rank 1's range |
    rank 0's shard  | its range of section 0 | its range of section 1 |

So all ranks own as many elements of weights, gradients and state as the others. A gather writes each section of the
whole copy from the ranges as they lie in the shards. Nearly every unit has one section.

Ranges are multiples of :data:`CUT_NUMEL`, and a tensor is cut only at such multiples of its own elements: one that is
longer starts at one, a shorter one crosses none. So no block of a sum of squares is on two ranks, and none of 8-bit
state, which is shorter. A range of 16-bit weights consists of whole pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepoffload.native.aio import round_up
from deepoffload.native.cpu_adam import STATE_BLOCK, SUM_BLOCK
from deepoffload.params.layout import TensorRun, byte_offsets

CUT_NUMEL = SUM_BLOCK
"""Ranks' ranges of a section, and their runs of a tensor, begin at multiples of this many elements."""


class FlatTensor(NamedTuple):
    """A tensor of a unit, in the order of its bytes.

    Attributes:
        section: tensors that follow each other share a section where this is equal: by type, and whether they are
            trained. The type of the weights counts also where ``itemsize`` is that of gradients, so that both are cut
            alike.
    """

    numel: int
    itemsize: int
    section: Hashable = None


@dataclass(frozen=True, slots=True)
class Section:
    """Tensors that are cut together (all in bytes): where they lie in the whole copy, where a rank's range of them lies
    in its shard, and how long each range is."""

    whole_offset: int
    shard_offset: int
    range_nbytes: int


class OwnedRun(NamedTuple):
    """Consecutive elements of one tensor that a rank owns, and where they lie in its shard and in the whole copy (in
    bytes)."""

    tensor: int
    start: int
    numel: int
    shard_offset: int
    whole_offset: int


class ByteMove(NamedTuple):
    """Bytes that go from one rank's shard to another's (ranks, and offsets in their shards)."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


class SharedRun(NamedTuple):
    """Consecutive elements of one tensor that one source has and one target wants (numbers of these)."""

    tensor: int
    start: int
    numel: int
    source: int
    target: int


class FilePlace(NamedTuple):
    """Where a tensor lies in a file, dense and in the order of its bytes in memory; it may have another type there."""

    offset: int
    itemsize: int


class FileRange(NamedTuple):
    """What is read from a file: bytes, and for which run."""

    run: OwnedRun
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A unit's tensors, cut for ``world_size`` ranks. :func:`shard_layout` makes it.

    Attributes:
        offsets: of each tensor in the whole copy, in bytes.
        section_of: by tensor, the number of its section.
        whole_nbytes: ``world_size`` times ``shard_nbytes``.
    """

    world_size: int
    tensors: tuple[FlatTensor, ...]
    offsets: tuple[int, ...]
    sections: tuple[Section, ...]
    section_of: tuple[int, ...]
    shard_nbytes: int

    @property
    def whole_nbytes(self) -> int:
        return self.shard_nbytes * self.world_size

    def owner(self, tensor: int, start: int) -> int:
        """The rank that owns element ``start`` of a tensor."""
        return self._place(tensor, start)[0]

    def shard_offset(self, rank: int, tensor: int, start: int) -> int:
        """Where in ``rank``'s shard element ``start`` of a tensor lies, in bytes. The elements of its run follow.

        Raises:
            ValueError: another rank owns the element.
        """
        owner, offset = self._place(tensor, start)
        if owner != rank:
            raise ValueError(f"element {start} of tensor {tensor} is rank {owner}'s, not rank {rank}'s")
        return offset

    def _place(self, tensor: int, start: int) -> tuple[int, int]:
        if not 0 <= start < self.tensors[tensor].numel:
            raise ValueError(f"tensor {tensor} has {self.tensors[tensor].numel} elements, no element {start}")
        section = self.sections[self.section_of[tensor]]
        position = self.offsets[tensor] + start * self.tensors[tensor].itemsize - section.whole_offset
        owner, offset = divmod(position, section.range_nbytes)
        return owner, section.shard_offset + offset

    def runs(self, rank: int) -> Iterator[OwnedRun]:
        """What ``rank`` owns, in the order of its shard. Nothing, where the unit has fewer blocks than there are
        ranks."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} among {self.world_size}")
        for index in range(len(self.tensors)):
            run = self.run_of(rank, index)
            if run is not None:
                yield run

    def run_of(self, rank: int, tensor: int) -> OwnedRun | None:
        """What ``rank`` owns of one tensor, None where that is nothing."""
        numel, itemsize, _ = self.tensors[tensor]
        section = self.sections[self.section_of[tensor]]
        range_begin = section.whole_offset + rank * section.range_nbytes
        begin = max(self.offsets[tensor], range_begin)
        end = min(self.offsets[tensor] + numel * itemsize, range_begin + section.range_nbytes)
        if begin >= end:
            return None
        start = (begin - self.offsets[tensor]) // itemsize
        shard_offset = section.shard_offset + begin - range_begin
        return OwnedRun(tensor, start, (end - begin) // itemsize, shard_offset, begin)

    def runs_between(self, rank: int, begin: int, end: int) -> Iterator[OwnedRun]:
        """What of :meth:`runs` lies in the bytes from ``begin`` to ``end`` of the shard, neither of them inside an
        element. For what comes range by range: a range that ends at a multiple of :data:`CUT_NUMEL` elements of a
        section cuts no block of a sum of squares."""
        for tensor, start, numel, shard_offset, whole_offset in self.runs(rank):
            itemsize = self.tensors[tensor].itemsize
            low, high = max(begin, shard_offset), min(end, shard_offset + numel * itemsize)
            if low < high:
                skipped = low - shard_offset
                start += skipped // itemsize
                yield OwnedRun(tensor, start, (high - low) // itemsize, low, whole_offset + skipped)


def shard_layout(tensors: Sequence[FlatTensor], world_size: int) -> ShardLayout:
    """Lay out a unit and cut it for ``world_size`` ranks.

    Raises:
        ValueError: ``world_size`` is not positive, or the tensors of a section have different item sizes.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if world_size == 1:
        starts, nbytes = byte_offsets([numel * itemsize for numel, itemsize, _ in tensors])
        whole = Section(0, 0, nbytes)
        return ShardLayout(1, tuple(tensors), tuple(starts), (whole,), (0,) * len(tensors), nbytes)
    offsets: list[int] = []
    sections: list[Section] = []
    section_of: list[int] = []
    whole_end = shard_end = 0
    for group in _groups(tensors):
        itemsize, position = group[0].itemsize, 0
        for tensor in group:
            if tensor.itemsize != itemsize:
                raise ValueError(f"a section has items of {itemsize} and of {tensor.itemsize} bytes")
            position = round_up(position, STATE_BLOCK)
            if position % CUT_NUMEL + tensor.numel > CUT_NUMEL:
                position = round_up(position, CUT_NUMEL)
            offsets.append(whole_end + position * itemsize)
            section_of.append(len(sections))
            position += tensor.numel
        range_nbytes = round_up(position, CUT_NUMEL * world_size) // world_size * itemsize
        sections.append(Section(whole_end, shard_end, range_nbytes))
        whole_end += range_nbytes * world_size
        shard_end += range_nbytes
    return ShardLayout(world_size, tuple(tensors), tuple(offsets), tuple(sections), tuple(section_of), shard_end)


def _groups(tensors: Iterable[FlatTensor]) -> Iterator[list[FlatTensor]]:
    group: list[FlatTensor] = []
    for tensor in tensors:
        if group and tensor.section != group[-1].section:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def shared_runs(
    sources: Sequence[Iterable[TensorRun | OwnedRun]], targets: Sequence[Iterable[TensorRun | OwnedRun]]
) -> Iterator[SharedRun]:
    """Which elements go from which of ``sources`` to which of ``targets``: each of these has the runs that one rank
    owns, or that one piece of state holds. Tensor by tensor, in the order of elements."""
    given, wanted = _by_tensor(sources), _by_tensor(targets)
    for tensor, wants in sorted(wanted.items()):
        gives = iter(given.get(tensor, ()))
        give = next(gives, None)
        for begin, end, target in wants:
            while give is not None and give[0] < end:
                low, high = max(begin, give[0]), min(end, give[1])
                if low < high:
                    yield SharedRun(tensor, low, high - low, give[2], target)
                if give[1] > end:
                    break  # the next target wants the rest
                give = next(gives, None)


def _by_tensor(owners: Sequence[Iterable[TensorRun | OwnedRun]]) -> dict[int, list[tuple[int, int, int]]]:
    """Begin, end and owner of the runs of each tensor, in order."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for owner, runs in enumerate(owners):
        for run in runs:
            if run.numel:
                found.setdefault(run.tensor, []).append((run.start, run.start + run.numel, owner))
    for runs_of_one in found.values():
        runs_of_one.sort()
    return found


def moves(source: ShardLayout, target: ShardLayout) -> list[ByteMove]:
    """The bytes that move when the shards of ``source`` become those of ``target``, as few ranges as possible. What
    stays on its rank is among them; padding is not.

    Raises:
        ValueError: the two are not layouts of the same tensors in the same types.
    """
    if [tensor[:2] for tensor in source.tensors] != [tensor[:2] for tensor in target.tensors]:
        raise ValueError("only layouts of the same tensors, in the same types, can be converted into each other")
    found: list[ByteMove] = []
    ranks = [[list(layout.runs(rank)) for rank in range(layout.world_size)] for layout in (source, target)]
    for tensor, start, numel, giver, taker in shared_runs(*ranks):
        move = ByteMove(
            giver,
            source.shard_offset(giver, tensor, start),
            taker,
            target.shard_offset(taker, tensor, start),
            numel * source.tensors[tensor].itemsize,
        )
        if found and _follows(found[-1], move):
            found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + move.nbytes)
        else:
            found.append(move)
    return found


def _follows(before: ByteMove, after: ByteMove) -> bool:
    return (
        (before.source, before.target) == (after.source, after.target)
        and before.source_offset + before.nbytes == after.source_offset
        and before.target_offset + before.nbytes == after.target_offset
    )


def file_ranges(runs: Iterable[OwnedRun], places: Sequence[FilePlace]) -> Iterator[FileRange]:
    """The bytes of a file with whole tensors, such as a safetensors file, that hold the elements of ``runs``;
    ``places``: of each tensor of the unit.

    A tensor whose elements lie in another order in the file than in memory (a transposed weight) has no such ranges.
    """
    for run in runs:
        offset, itemsize = places[run.tensor]
        yield FileRange(run, offset + run.start * itemsize, run.numel * itemsize)
