"""What one forward and backward did, visit by visit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MALLOC_CHUNK_MAX_BYTES = 32 << 20
"""Larger chunks are mapped and given back when freed (mallopt(3), ``M_MMAP_THRESHOLD``)."""


class NotRegular(Exception):
    """Recordings, or parts of one, that should be alike or follow one rule do not."""


@dataclass(frozen=True)
class Shape:
    """A tensor argument, to be made again with any values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Op:
    """One kind of kernel call: what is called, with tensors of which shapes, strides and types."""

    name: str
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    flops: int
    nbytes: int
    _hash: int = field(init=False, repr=False, compare=False)  # asked for several times in each call

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.name, self.tensors)))

    def __hash__(self) -> int:
        return self._hash


@dataclass
class Visit:
    """A stretch of the program in which one set of units is used: a forward or a backward, and its kernel calls.

    ``landed``: parameters of each unit whose gradients are complete in it.
    """

    backward: bool
    units: tuple[int, ...]
    ops: Counter[Op] = field(default_factory=Counter)
    landed: Counter[int] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        return sum(op.flops * count for op, count in self.ops.items())


@dataclass(frozen=True)
class DryRun:
    """What one forward and backward takes.

    saved_bytes: activations alive when the forward ends (the loss among them). head_bytes: those of them that were made
    after the last unit was entered: logits and what the loss keeps. peak_bytes: most bytes alive at a time without
    weights, buffers and landed gradients; gradients count until they have landed. largest_chunk_bytes: the
    largest tensor that ``malloc`` takes from its heap. heap_bytes: of all tensors that it takes from there, one after
    the other. recomputes: whether backward runs parts of the forward again (activation checkpointing). calls: how to
    repeat each kernel.
    """

    visits: tuple[Visit, ...]
    saved_bytes: int
    head_bytes: int
    peak_bytes: int
    largest_chunk_bytes: int
    heap_bytes: int
    recomputes: bool
    calls: Mapping[Op, tuple[Any, tuple[Any, ...], dict[str, Any]]]

    @property
    def flops(self) -> int:
        return sum(visit.flops for visit in self.visits)


@dataclass
class LiveBytes:
    """What happens to live bytes in a part of a visit: a visit is one span, or two where the forward ends in it.

    ``net_bytes``: more at its end than at its beginning. ``over_bytes``: most at a time, over those at its beginning;
    ``over_by_call``: after the first calls of each kernel, and most after all others. ``freed``: of bytes that another
    visit made, by the number of that visit. ``after_forward``: of the backward.
    """

    visit: int
    after_forward: bool
    net_bytes: int = 0
    over_bytes: int = 0
    over_by_call: dict[tuple[Op, int], int] = field(default_factory=dict)
    freed: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Recording:
    """A run of forward and backward, visit by visit. ``made_bytes``: of each tensor that a kernel makes.

    The other attributes are those of :class:`DryRun`.
    """

    visits: tuple[Visit, ...]
    spans: tuple[LiveBytes, ...]
    made_bytes: Mapping[Op, tuple[int, ...]]
    head_bytes: int
    largest_chunk_bytes: int
    recomputes: bool
    calls: Mapping[Op, tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def summary(self) -> DryRun:
        live = peak = saved = 0
        for span in self.spans:
            if not span.after_forward:
                saved = live + span.net_bytes
            peak = max(peak, live + span.over_bytes)
            live += span.net_bytes
        made = {op: sum(n for n in sizes if n <= MALLOC_CHUNK_MAX_BYTES) for op, sizes in self.made_bytes.items()}
        return DryRun(
            visits=tuple(visit for visit in self.visits if visit.ops or visit.units),
            saved_bytes=saved,
            head_bytes=self.head_bytes,
            peak_bytes=peak,
            largest_chunk_bytes=self.largest_chunk_bytes,
            heap_bytes=sum(made[op] * count for visit in self.visits for op, count in visit.ops.items()),
            recomputes=self.recomputes,
            calls=self.calls,
        )
