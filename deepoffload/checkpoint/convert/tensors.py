"""A tensor that is read piece by piece: from a file, from several, or made of others."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

PIECE_BYTES = 1 << 20
"""What a reader is asked for at a time."""


class Values(Protocol):
    """A tensor whose elements are read in row-major order."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, numel: int) -> Tensor:
        """Elements as a flat, contiguous tensor on the CPU."""
        ...


def numel_of(values: Values) -> int:
    return math.prod(values.shape)


def nbytes_of(values: Values) -> int:
    return numel_of(values) * values.dtype.itemsize


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU that has a dimension."""
    return values.view(torch.uint8).numpy().data


def pieces_of(values: Values) -> Iterator[Tensor]:
    """All elements in order."""
    step, total = max(1, PIECE_BYTES // values.dtype.itemsize), numel_of(values)
    for start in range(0, total, step):
        yield values.read(start, min(step, total - start))


@dataclass(frozen=True)
class Computed:
    """Elements that a function gives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read_with: Callable[[int, int], Tensor]

    def read(self, start: int, numel: int) -> Tensor:
        return self.read_with(start, numel)


@dataclass(frozen=True)
class Held:
    """A small tensor in memory."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, start: int, numel: int) -> Tensor:
        return self.tensor.detach().cpu().contiguous().view(-1)[start : start + numel]


@dataclass(frozen=True)
class Converted:
    """The same values in another type."""

    source: Values
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, start: int, numel: int) -> Tensor:
        return self.source.read(start, numel).to(self.dtype)


def in_type(values: Values, dtype: torch.dtype) -> Values:
    """A floating-point tensor as ``dtype``; any other as it is."""
    return Converted(values, dtype) if values.dtype.is_floating_point else values


def in_fp32(values: Values) -> Values:
    """A floating-point tensor as fp32; any other as it is."""
    return in_type(values, torch.float32)


@dataclass(frozen=True)
class Fragment:
    """Elements ``start`` to ``start + numel`` of a flat tensor."""

    values: Values
    start: int
    numel: int


@dataclass(frozen=True)
class Joined:
    """Fragments one after the other, as one tensor."""

    shape: tuple[int, ...]
    fragments: Sequence[Fragment]

    @property
    def dtype(self) -> torch.dtype:
        return self.fragments[0].values.dtype if self.fragments else torch.float32

    @cached_property
    def _ends(self) -> list[int]:
        ends, total = [], 0
        for fragment in self.fragments:
            total += fragment.numel
            ends.append(total)
        return ends

    def read(self, start: int, numel: int) -> Tensor:
        parts = []
        index = bisect.bisect_right(self._ends, start)
        while numel > 0:
            fragment = self.fragments[index]
            inside = start - (self._ends[index] - fragment.numel)
            count = min(numel, fragment.numel - inside)
            if count > 0:
                parts.append(fragment.values.read(fragment.start + inside, count))
            start, numel, index = start + count, numel - count, index + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class Partitioned:
    """A tensor in equal parts, each at the same place of a flat tensor: the first part in the first one, and so on."""

    shape: tuple[int, ...]
    flats: Sequence[Values]
    begin: int
    part_numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.flats[0].dtype

    def read(self, start: int, numel: int) -> Tensor:
        parts = []
        while numel > 0:
            rank, inside = divmod(start, self.part_numel)
            count = min(numel, self.part_numel - inside)
            parts.append(self.flats[rank].read(self.begin + inside, count))
            start, numel = start + count, numel - count
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class Reshaped:
    """The same elements in another shape."""

    source: Values
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, start: int, numel: int) -> Tensor:
        return self.source.read(start, numel)
