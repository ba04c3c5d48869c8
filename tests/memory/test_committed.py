"""Blocks of a step that becomes durable: when they are written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from deepoffload.memory.block import Block
from deepoffload.memory.committed import WRITES_AHEAD, CommittedBlocks
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.cost_model import BlockKind
from tests.memory.conftest import Rig
from tests.support.waiting import Gate, settle_transfers, wait_until


def filled(tiers: TierManager, kind: BlockKind, name: str) -> Block:
    block = tiers.create(name, kind, PAGE_BYTES)
    tiers.acquire(block)
    ctypes.memset(tiers.address(block), 7, PAGE_BYTES)
    tiers.will_change(block)
    tiers.release(block)
    return block


def test_what_stays_in_memory_is_written_while_little_is_read(make_rig: Callable[..., Rig], gate: Gate) -> None:
    """The reads of the forward pass come first; those weights can be written in backward."""
    tiers = make_rig(32 * PAGE_BYTES, faults=f"op=read {gate.word}").tiers
    pieces = [filled(tiers, BlockKind.STATE, f"piece {n}") for n in range(WRITES_AHEAD)]
    weights = [filled(tiers, BlockKind.WEIGHT, f"weight {n}") for n in range(2 * WRITES_AHEAD)]
    committed = CommittedBlocks(tiers, lambda _: None, lambda: None, lambda: False)
    with tiers.lock:
        for block in weights:
            tiers.keep(block)
        assert all(tiers.evict(piece) for piece in pieces)
        settle_transfers(tiers)
        frozen = [committed.freeze(block) for block in weights]
        for count, piece in enumerate(pieces, 1):
            assert tiers.prefetch(piece)
            if count == WRITES_AHEAD:
                committed.pump()
                assert [block.state for block in weights] == [BlockState.DIRTY] * len(weights)
    gate.open()
    wait_until(lambda: len(tiers.transfers.done()) == len(pieces))
    with tiers.lock:
        tiers.poll()
        committed.pump()
        assert [block.state for block in weights].count(BlockState.WRITING) == WRITES_AHEAD
        committed.write_all()
        assert all(block.extent is not None and block.lost is None for block in frozen)
        for block in frozen:
            committed.release(block)
