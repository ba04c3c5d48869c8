"""What is said when a block finds no room: who holds it, how much is missing, and why, where bytes would be free."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from deepoffload.errors import BudgetError
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.placement import BlockKind
from tests.memory.conftest import Owner

PAGES = 24


def in_pieces(tiers: TierManager, nbytes: int) -> list[Block]:
    """The memory full of blocks; of every two the program looks at one."""
    blocks = []
    for number in range(PAGES * PAGE_BYTES // nbytes):
        blocks.append(tiers.create(f"layer {number}", BlockKind.WEIGHT, nbytes, Owner()))
        tiers.acquire(blocks[-1])
        tiers.release(blocks[-1])
    for block in blocks[::2]:
        block.owner.references = 1  # type: ignore[union-attr]
    return blocks


def said(tmp_path: Path, arena: Arena, wanted_bytes: int) -> BudgetError | None:
    engine = IoEngine(backend="pool")
    space = SwapSpace(engine, [tmp_path], budget_bytes=1 << 20, label="test")
    tiers = TierManager(arena, space)
    try:
        in_pieces(tiers, PAGE_BYTES)
        tiers.acquire(tiers.create("wanted", BlockKind.WEIGHT, wanted_bytes))
    except BudgetError as error:
        return error
    finally:
        tiers.close()
        space.close()
        engine.close()
    return None


FREE_BYTES = PAGES // 2 * PAGE_BYTES
"""What the program does not look at."""


def test_free_bytes_in_pieces_are_room(tmp_path: Path) -> None:
    assert said(tmp_path, Arena(PAGES * PAGE_BYTES), FREE_BYTES) is None


@pytest.mark.parametrize("lends", [True, False])
def test_memory_that_the_program_looks_at_is_named_and_never_called_fragmented(tmp_path: Path, lends: bool) -> None:
    error = said(tmp_path, Arena(PAGES * PAGE_BYTES, lends=lends), FREE_BYTES + 3 * PAGE_BYTES)
    assert error is not None
    lines = str(error).splitlines()
    assert f"{PAGES * PAGE_BYTES:,} bytes are budgeted and {FREE_BYTES:,}, in whole pages, must stay" in lines[0]
    names = [
        f"  layer {number} (weight): {PAGE_BYTES:,} bytes, still referred to by the program"
        for number in range(0, 16, 2)
    ]
    assert lines[1:10] == [*names, f"  and {PAGES // 2 - 8} more: {(PAGES // 2 - 8) * PAGE_BYTES:,} bytes"]
    assert error.enough_bytes == (PAGES + 3) * PAGE_BYTES
    assert f"or raise host_budget by {3 * PAGE_BYTES:,} bytes, to {error.enough_bytes} bytes." in lines[-1]
    assert "fragmented" not in str(error)
    assert said(tmp_path, Arena(error.enough_bytes), FREE_BYTES + 3 * PAGE_BYTES) is None


def test_pages_that_the_system_keeps_where_they_are_leave_memory_fragmented(tmp_path: Path) -> None:
    arena = Arena(PAGES * PAGE_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)  # as mlockall does it, for these pages alone
    assert libc.mlock(ctypes.c_void_p(arena.address), ctypes.c_size_t(PAGES * PAGE_BYTES)) == 0, ctypes.get_errno()
    error = said(tmp_path, arena, 2 * PAGE_BYTES)
    assert error is not None
    text = str(error)
    assert f"Memory is fragmented: {FREE_BYTES:,} bytes are free" in text and "mlockall" in text, text
    assert error.enough_bytes == (PAGES + 2) * PAGE_BYTES and f"to {error.enough_bytes} bytes" in text


def test_pages_that_a_driver_knows_leave_memory_fragmented(tmp_path: Path) -> None:
    error = said(tmp_path, Arena(PAGES * PAGE_BYTES, lends=False), 2 * PAGE_BYTES)
    assert error is not None
    assert "fragmented" in str(error) and "driver" in str(error) and "ulimit" not in str(error), error
    assert error.enough_bytes == (PAGES + 2) * PAGE_BYTES
