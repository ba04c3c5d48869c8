"""The states of a block, in the engine (``memory.block``) and in simulated time (``clock``)."""

from __future__ import annotations

from enum import Enum


class BlockState(Enum):
    """Who holds the bytes of a block."""

    EMPTY = "nobody holds any bytes; the next user gets zeros or overwrites"
    ON_NVME = "the extent alone is right"
    READING = "the extent is right, the arena range is being filled"
    CLEAN = "arena range and extent are both right"
    DIRTY = "the arena range alone is right"
    WRITING = "the arena range is right, the extent is being filled"

    __hash__ = object.__hash__  # members are one of a kind; Enum's own is asked several times for every transfer


BLOCK_TRANSITIONS: dict[BlockState, frozenset[BlockState]] = {
    BlockState.EMPTY: frozenset({BlockState.DIRTY, BlockState.ON_NVME}),
    BlockState.ON_NVME: frozenset({BlockState.READING, BlockState.DIRTY, BlockState.EMPTY}),
    BlockState.READING: frozenset({BlockState.CLEAN, BlockState.ON_NVME}),
    BlockState.CLEAN: frozenset({BlockState.DIRTY, BlockState.ON_NVME, BlockState.EMPTY}),
    BlockState.DIRTY: frozenset({BlockState.WRITING, BlockState.EMPTY}),
    BlockState.WRITING: frozenset({BlockState.CLEAN, BlockState.DIRTY}),
}
