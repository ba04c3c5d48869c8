"""Where parameters lie in their unit's blocks: pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepoffload.native.aio import round_up

ALIGNMENT_BYTES = 64
"""Each tensor starts on a cache line, which is also the widest vector register."""

DEVICE_ALIGNMENT_BYTES = 256
"""The same of weights that a device shows. Its library of matrix products chooses a kernel by the alignment of what it
is given, of which it looks at no more than this (``_getAlignment`` in torch's ``CUDABlas.cpp``): a weight then gets the
kernel, and the bits, that it gets in plain PyTorch, whose allocator aligns to 512."""

ALIGNMENT_NUMEL = 64
"""Arrays of a state piece are padded to this many elements, so that each starts aligned for every element size."""


def byte_offsets(sizes_bytes: Sequence[int], alignment_bytes: int = ALIGNMENT_BYTES) -> tuple[list[int], int]:
    """Offsets of tensors laid one after the other, each aligned, and the total size, all in bytes."""
    offsets: list[int] = []
    position = 0
    for size in sizes_bytes:
        position = round_up(position, alignment_bytes)
        offsets.append(position)
        position += size
    return offsets, round_up(position, alignment_bytes)


class TensorRun(NamedTuple):
    """Consecutive elements of one tensor (all in elements)."""

    tensor: int
    start: int
    numel: int


def whole_tensors(numels: Sequence[int]) -> list[TensorRun]:
    """All elements of tensors, one run each."""
    return [TensorRun(index, 0, numel) for index, numel in enumerate(numels)]


@dataclass(frozen=True, slots=True)
class PieceSegment:
    """A run of one parameter's elements inside a state piece (all in elements)."""

    tensor: int
    start: int
    numel: int
    piece_start: int


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """A piece of optimizer state: ``numel`` padded elements of each state array, and whose elements they are."""

    numel: int
    segments: tuple[PieceSegment, ...]


def cut_pieces(
    runs: Sequence[TensorRun], piece_numel: int, alignment_numel: int = ALIGNMENT_NUMEL, least_numel: int = 0
) -> list[PieceLayout]:
    """Cut runs of tensors, laid one after the other, into pieces of at most ``piece_numel`` elements.

    A run may span pieces and a piece may hold several runs; each segment starts at a multiple of ``alignment_numel``
    inside its piece and inside its tensor.

    Args:
        least_numel: so many elements there are at least; pieces beyond the runs hold nothing.

    Raises:
        ValueError: ``piece_numel`` is not a positive multiple of ``alignment_numel``, or a run starts at none.
    """
    if piece_numel < alignment_numel or piece_numel % alignment_numel:
        raise ValueError(f"piece_numel must be a positive multiple of {alignment_numel}, got {piece_numel}")
    pieces: list[PieceLayout] = []
    segments: list[PieceSegment] = []
    filled = 0
    for tensor, start, left in runs:
        if start % alignment_numel:
            raise ValueError(f"a run of tensor {tensor} starts at {start}, which is no multiple of {alignment_numel}")
        while left > 0:
            if filled >= piece_numel:
                pieces.append(PieceLayout(filled, tuple(segments)))
                segments, filled = [], 0
            numel = min(left, piece_numel - filled)
            segments.append(PieceSegment(tensor, start, numel, filled))
            filled = round_up(filled + numel, alignment_numel)
            start, left = start + numel, left - numel
    missing = least_numel - len(pieces) * piece_numel
    while segments or missing > 0:
        pieces.append(PieceLayout(max(filled, min(missing, piece_numel)), tuple(segments)))
        segments, filled, missing = [], 0, missing - piece_numel
    return pieces


def cut_whole(
    runs: Sequence[TensorRun], piece_numel: int, alignment_numel: int = ALIGNMENT_NUMEL, least_numel: int = 0
) -> list[PieceLayout]:
    """As :func:`cut_pieces`, where a run spans pieces only if it is larger than one: then it has separate pieces."""
    pieces: list[PieceLayout] = []
    together: list[TensorRun] = []
    filled = 0
    for run in runs:
        padded = round_up(run.numel, alignment_numel)
        if filled + padded > piece_numel:
            pieces += cut_pieces(together, piece_numel, alignment_numel)
            together, filled = [], 0
        if padded > piece_numel:
            pieces += cut_pieces([run], piece_numel, alignment_numel)
        else:
            together.append(run)
            filled += padded
    pieces += cut_pieces(together, piece_numel, alignment_numel)
    missing = least_numel - sum(piece.numel for piece in pieces)
    return pieces + (cut_pieces([], piece_numel, alignment_numel, missing) if missing > 0 else [])
