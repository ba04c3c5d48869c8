"""Whom to evict: one rule for the engine's two memories, for plans and for simulations.

The block whose next use lies farthest ahead leaves first. That is optimal for blocks of one size (Belady, "A study of
replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966).

Ties are common: all blocks of an event have the same distance. Among these

1. a clean block leaves before a dirty one: it costs a read, the other one a write, too;
2. then the highest id leaves first. The blocks of a unit are numbered in the order in which an event brings them
   (weights, gradients, pieces of state), so the highest one is used last. In a cyclic order any choice is as good as
   another as long as it is the same in every cycle: then the others stay, where turns would have each of them leave.
   (Over 432 simulated chains the lowest id gives the same faults, and bytes that differ by less than one in 2000.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop

Rank = tuple[float, bool, int]
"""Distance to the next use, whether it is clean, id. The greatest leaves first."""


def is_always_clean(block: int) -> bool:
    """For callers that offer clean blocks only."""
    return True


def leaving_order(
    candidates: Iterable[int],
    next_use: Callable[[int], float],
    *,
    is_clean: Callable[[int], bool] = is_always_clean,
) -> Iterator[int]:
    """The candidates, in the order in which they leave. Lazy: the first one costs O(n), each other O(log n).

    The caller offers only what may be evicted: nothing leased, nothing that the running event uses.
    """
    heap = [(-next_use(block), not is_clean(block), -block) for block in candidates]
    heapify(heap)
    while heap:
        yield -heappop(heap)[2]


def choose_victim(
    candidates: Iterable[int],
    next_use: Callable[[int], float],
    *,
    is_clean: Callable[[int], bool] = is_always_clean,
    farther_than: float = -math.inf,
) -> int | None:
    """The first of :func:`leaving_order` whose next use is strictly ``farther_than``; None when there is none."""
    ranks = (rank(block, next_use, is_clean) for block in candidates)
    best = max((found for found in ranks if found[0] > farther_than), default=None)
    return None if best is None else best[2]


def rank(block: int, next_use: Callable[[int], float], is_clean: Callable[[int], bool] = is_always_clean) -> Rank:
    """By which blocks leave, the greatest first."""
    return next_use(block), is_clean(block), block
