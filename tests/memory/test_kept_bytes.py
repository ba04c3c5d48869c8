"""What blocks held before a change that may be undone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from deepoffload.memory.block import Block
from deepoffload.memory.kept_bytes import KeptBytes
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.schedule.cost_model import BlockKind
from tests.memory.conftest import Owner, Rig

NBYTES = 3 * PAGE_BYTES - 100


def filled(tiers: TierManager, value: int, owner: Owner | None = None) -> Block:
    block = tiers.create(f"block {value}", BlockKind.STATE, NBYTES, owner)
    tiers.acquire(block)
    tiers.will_change(block)
    ctypes.memset(tiers.address(block), value, NBYTES)
    tiers.release(block)
    return block


def held(tiers: TierManager, block: Block) -> bytes:
    return ctypes.string_at(tiers.address(block), NBYTES)


@pytest.mark.parametrize("outcome", ["right", "wrong", "interrupted"])
@pytest.mark.parametrize("stays", [True, False])
def test_in_turn_with_its_journal(make_rig: Callable[..., Rig], outcome: str, stays: bool) -> None:
    """A block gets the memory of its journal: what is not written there is as it was, undone all of it is. One that
    tensors show stays where it is."""
    tiers = make_rig(32 * PAGE_BYTES).tiers
    with tiers.lock:
        block, shown = filled(tiers, 1), filled(tiers, 2, Owner())
        if stays:
            tiers.keep(block)
            tiers.keep(shown)
        before, at, shown_at = held(tiers, block), tiers.address(block), tiers.address(shown)
        both = [block, shown]
        kept = KeptBytes(tiers, both, 1, {each.id for each in both} if stays else (), in_turn=True)
        for each in both:
            tiers.acquire(each)
            kept.will_change(each)
        (place,) = kept.elsewhere()
        assert tiers.address(shown) == shown_at
        assert place == (tiers.address(block), NBYTES, at) and place.begin != at
        ctypes.memset(tiers.address(shown), 9, NBYTES)
        ctypes.memset(place.begin, 0x5A, NBYTES)  # what was there before
        written = ((4000, 200), (0, 64), (8192, 1))
        for start, nbytes in written:
            ctypes.memset(place.begin + start, 8, nbytes)
        if outcome != "interrupted":
            kept.wrote((place.begin + start, nbytes) for start, nbytes in written)
            for each in both:
                kept.changed(each)
            assert not kept.elsewhere()
            after = bytearray(before)
            for start, nbytes in written:
                after[start : start + nbytes] = bytes([8]) * nbytes
            assert held(tiers, block) == after and place.begin == tiers.address(block)
        for each in both:
            tiers.release(each)
        if outcome == "right":
            journals = kept.forget()
            assert held(tiers, block) == after and held(tiers, shown) == bytes([9]) * NBYTES
            for journal in journals:
                tiers.remove(journal)
        else:
            kept.restore()
            assert held(tiers, block) == before and held(tiers, shown) == bytes([2]) * NBYTES
        assert {each.name for each in tiers.blocks()} == {block.name, shown.name}
        assert not any(each.leases for each in tiers.blocks())
        assert tiers.arena.used_bytes == 2 * 3 * PAGE_BYTES
        if not stays:
            assert all(tiers.evict(each) for each in both)
            tiers.acquire(block)
            assert held(tiers, block) == (after if outcome == "right" else before)
            tiers.release(block)


@pytest.mark.parametrize("ahead", [True, False])
def test_undone_in_parts(make_rig: Callable[..., Rig], ahead: bool) -> None:
    """What is new goes first, then journals come from NVMe, as many as there is memory for; all is as it was."""
    tiers = make_rig(16 * PAGE_BYTES).tiers
    with tiers.lock:
        moves, stays = filled(tiers, 1), filled(tiers, 2)
        tiers.keep(stays)
        assert tiers.evict(moves)
        kept = KeptBytes(tiers, [moves, stays], 1)
        for block in (moves, stays):
            tiers.acquire(block)
            kept.will_change(block)
            ctypes.memset(tiers.address(block), 9, NBYTES)
            kept.changed(block)
            tiers.release(block)
        (journal,) = (block for block in tiers.blocks() if block not in (moves, stays))
        assert journal.is_brief and tiers.evict(journal)
        if ahead:
            kept.drop_new()
            assert not moves.resident and tiers.has_bytes(moves) and tiers.arena.used_bytes == 3 * PAGE_BYTES
            kept.drop_new()
            kept.fetch_journals()
            assert tiers.counters.prefetches == 1
        kept.restore()
        tiers.acquire(moves)
        assert held(tiers, moves) == bytes([1]) * NBYTES and held(tiers, stays) == bytes([2]) * NBYTES
        tiers.release(moves)
        assert set(tiers.blocks()) == {moves, stays}


@pytest.mark.parametrize("outcome", ["right", "wrong", "outside"])
def test_kept_in_parts(make_rig: Callable[..., Rig], outcome: str) -> None:
    """A part is kept when it is about to be written, as if it were a block: whole pages, none of them twice. So all
    parts together take no more disk space than the block. What does not lie in the block is no part of it: all is
    kept."""
    tiers = make_rig(32 * PAGE_BYTES).tiers
    with tiers.lock:
        block = filled(tiers, 1)
        tiers.keep(block)
        kept = KeptBytes(tiers, [block], 1, in_parts={block.id})
        tiers.acquire(block)
        kept.will_change(block)
        assert set(tiers.blocks()) == {block}
        begin = tiers.address(block)
        for start, nbytes, value in ((100, 300, 7), (4000, 200, 8), (300, 500, 9)):
            away = [(begin - 64, 64)] if outcome == "outside" else []
            kept.will_write([(begin + start, 50), (begin + start + 50, nbytes - 50), *away])
            ctypes.memset(begin + start, value, nbytes)
        kept.changed(block)
        tiers.release(block)
        journals = [other for other in tiers.blocks() if other is not block]
        assert [journal.nbytes for journal in journals] == ([NBYTES] if outcome == "outside" else [PAGE_BYTES] * 2)
        assert all(tiers.evict(journal) for journal in journals)
        assert tiers.space is not None and tiers.space.used_bytes <= round_up(NBYTES)
        if outcome == "right":
            after = held(tiers, block)
            assert sorted(kept.forget(), key=lambda journal: journal.id) == journals
            assert held(tiers, block) == after and after[299:301] == bytes([7, 9])
            for journal in journals:
                tiers.remove(journal)
        else:
            kept.restore()
            assert held(tiers, block) == bytes([1]) * NBYTES
        assert set(tiers.blocks()) == {block} and not block.leases
        assert tiers.arena.used_bytes == 3 * PAGE_BYTES
