"""How a rank's gradients of a unit lie in its contribution, and where the owner of a part lands them. Arithmetic only.

A contribution is the whole gradient of a unit, cut for its owners as the unit's gradient shards are, in the types that
autograd makes::

    contribution  | rank 0's part | rank 1's part | ...
    a part        | its range of section 0 | its range of section 1 | ... | which parameters the contribution has |

An element has the same place in its range as in the fp32 shard, with another element size. Where autograd has made no
gradient of a parameter, the contribution has -0.0, which changes no bit of what it is added to. The last bytes of each
part say which parameters these are: one byte for each, with ``PRESENT`` where there is a gradient, and ``MORE`` where
the rank may give another one before the step. All have ``RESUMED`` where others came between the unit's gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from deepoffload.native.aio import round_up
from deepoffload.native.cpu_adam import SUM_BLOCK, DType
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.params.shards import OwnedRun, ShardLayout

FP32_BYTES = 4
RANGE_ALIGNMENT_BYTES = SUM_BLOCK * FP32_BYTES
"""Ranges begin at multiples of it in their part, so what is landed chunk by chunk cuts no block of a sum of squares."""
PART_ALIGNMENT_BYTES = 64

PRESENT, MORE, RESUMED = 1, 2, 4
"""What a contribution says of a parameter, in bits."""

CARRIER = torch.int16
"""The type as which transports see a contribution, also one of several types."""


class Stretch(NamedTuple):
    """Consecutive elements of a parameter, and where in the contribution they lie (in bytes)."""

    start: int
    numel: int
    offset: int


class LandingRun(NamedTuple):
    """Consecutive elements of a parameter that this rank owns.

    Attributes:
        part_offset: where they lie in this rank's part, in bytes.
        shard_offset: where they land in its shard, in bytes.
    """

    tensor: int
    start: int
    numel: int
    part_offset: int
    shard_offset: int
    dtype: DType


class ContributionLayout:
    """One unit's.

    Args:
        layout: of its fp32 gradients.
        dtypes: in which autograd makes them, one for each tensor of ``layout``; equal inside a section.
        rank: whose parts are landed here.

    Attributes:
        part_nbytes: of each rank's part.
        nbytes: of a whole contribution.
        own_runs: what this rank owns, in the order of its part.
    """

    def __init__(self, layout: ShardLayout, dtypes: Sequence[torch.dtype], rank: int) -> None:
        self._layout = layout
        self._itemsizes = [dtype.itemsize for dtype in dtypes]
        section_itemsizes = {section: dtype.itemsize for section, dtype in zip(layout.section_of, dtypes, strict=True)}
        self._range_offsets: list[int] = []
        end = 0
        for index, section in enumerate(layout.sections):
            begin = round_up(end, RANGE_ALIGNMENT_BYTES)
            self._range_offsets.append(begin)
            end = begin + section.range_nbytes // FP32_BYTES * section_itemsizes[index]
        self._presence_offset = end
        self.part_nbytes = round_up(end + len(dtypes), PART_ALIGNMENT_BYTES)
        self.nbytes = self.part_nbytes * layout.world_size
        self.own_runs = [
            LandingRun(
                run.tensor,
                run.start,
                run.numel,
                self._part_offset(run),
                run.shard_offset,
                NATIVE_DTYPES[dtypes[run.tensor]],
            )
            for run in layout.runs(rank)
        ]
        self._own_offsets = [run.part_offset for run in self.own_runs]
        self._stretches: list[list[Stretch]] = [[] for _ in dtypes]
        for owner in range(layout.world_size):
            for run in layout.runs(owner):
                offset = owner * self.part_nbytes + self._part_offset(run)
                self._stretches[run.tensor].append(Stretch(run.start, run.numel, offset))

    def _part_offset(self, run: OwnedRun) -> int:
        section = self._layout.section_of[run.tensor]
        position = (run.shard_offset - self._layout.sections[section].shard_offset) // FP32_BYTES
        return self._range_offsets[section] + position * self._itemsizes[run.tensor]

    def stretches(self, tensor: int) -> list[Stretch]:
        """Where the elements of a parameter lie in a contribution, in their order."""
        return self._stretches[tensor]

    def presence_offsets(self) -> Iterator[int]:
        """Where in a contribution each part says which parameters it has."""
        for owner in range(self._layout.world_size):
            yield owner * self.part_nbytes + self._presence_offset

    def presence_between(self, begin: int, end: int) -> tuple[int, int, int]:
        """Which parameters the bytes from ``begin`` to ``end`` of a part tell of: the first number, the one after the
        last, and where in the part it is said of the first."""
        count = len(self._itemsizes)
        first = min(max(begin - self._presence_offset, 0), count)
        return first, min(max(end - self._presence_offset, first), count), self._presence_offset + first

    def runs_between(self, begin: int, end: int) -> Iterator[LandingRun]:
        """What of :attr:`own_runs` lies in the bytes from ``begin`` to ``end`` of this rank's part, neither of them
        inside an element."""
        first = max(bisect_right(self._own_offsets, begin) - 1, 0)
        for tensor, start, numel, part_offset, shard_offset, dtype in islice(self.own_runs, first, None):
            if part_offset >= end:
                return
            itemsize = self._itemsizes[tensor]
            low, high = max(begin, part_offset), min(end, part_offset + numel * itemsize)
            if low < high:
                skipped = (low - part_offset) // itemsize
                shard = shard_offset + skipped * FP32_BYTES
                yield LandingRun(tensor, start + skipped, (high - low) // itemsize, low, shard, dtype)
