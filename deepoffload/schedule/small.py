"""Blocks that are small next to the largest: norms next to matrices."""

from __future__ import annotations

from typing import Any

SMALL_SHARE = 32


def is_small(nbytes: Any, largest_bytes: Any) -> Any:
    """Whether a block is so small that it stays in memory where nothing is trained: there it takes next to nothing.
    Also of arrays, element by element."""
    return nbytes * SMALL_SHARE <= largest_bytes
