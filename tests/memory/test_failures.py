"""What the disk refuses stays in memory; what can go, goes."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deepoffload.errors import ClosedError, IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind
from tests.memory.conftest import GivenOrder, Owner, Rig
from tests.support.waiting import Gate, settle_transfers


def fill(tiers: TierManager, name: str) -> Block:
    block = tiers.create(name, BlockKind.WEIGHT, PAGE_BYTES)
    tiers.acquire(block)
    tiers.release(block)
    return block


@pytest.mark.parametrize("clean", [True, False])
def test_victim_that_cannot_be_written_is_passed_over(tmp_path: Path, clean: bool) -> None:
    """Of two blocks the one chosen first is dirty and its write fails; the other goes if that needs no disk."""
    engine = IoEngine(backend="pool", fault_script=f"op=write after={int(clean)} errno={errno.EIO}")
    space = SwapSpace(engine, [tmp_path], budget_bytes=1 << 20, label="test")
    try:
        order = GivenOrder()
        tiers = TierManager(Arena(2 * PAGE_BYTES), space, order)
        other, dirty = fill(tiers, "other"), fill(tiers, "dirty")
        order.say = {other.id: 1.0, dirty.id: 2.0}.__getitem__
        if clean:
            assert tiers.write_behind(other)
            settle_transfers(tiers)
        wanted = tiers.create("wanted", BlockKind.WEIGHT, PAGE_BYTES)
        order.say = {other.id: 1.0, dirty.id: 2.0, wanted.id: 3.0}.__getitem__
        if clean:
            tiers.acquire(wanted)
            assert other.state is BlockState.ON_NVME
        else:
            with pytest.raises(IoFailure, match="dirty: write.*EIO"):
                tiers.acquire(wanted)
            assert wanted.leases == 0
        assert dirty.state is BlockState.DIRTY and dirty.offset is not None
        tiers.close()
    finally:
        space.close()
        engine.close()


@pytest.mark.parametrize("settles", [True, False])
def test_an_edit_is_not_lost_when_ctrl_c_ends_the_wait_for_a_write(
    make_rig: Callable[..., Rig], gate: Gate, settles: bool
) -> None:
    """The program has written while the bytes from before were on their way to the disk, and is asked only once."""
    rig = make_rig(4 * PAGE_BYTES, faults=f"op=write {gate.word}")
    tiers, block = rig.tiers, fill(rig.tiers, "layer.weight")
    block.owner = owner = Owner()
    assert tiers.write_behind(block)
    owner.wrote = True
    SHIELD.engage()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            tiers.evict(block)
    finally:
        SHIELD.disengage()
    assert block.state is BlockState.WRITING
    gate.open()
    if settles:
        settle_transfers(tiers)
        assert block.state is BlockState.DIRTY, "it would leave memory without being written"
    assert tiers.evict(block) and block.state is BlockState.ON_NVME
    assert rig.io.stats()["requests_done"] == 2, "it left memory without being written again"


def test_what_nobody_wants_is_not_waited_for(make_rig: Callable[..., Rig], gate: Gate) -> None:
    rig = make_rig(4 * PAGE_BYTES, faults=f"op=write {gate.word}")
    tiers = rig.tiers
    going, taken = fill(tiers, "layer.grad"), fill(tiers, "other.grad")
    assert tiers.write_behind(going) and tiers.write_behind(taken)
    for block in (going, taken):
        tiers.transfers.discard_soon(block)
    assert going.state is taken.state is BlockState.WRITING, "it has waited for the disk"
    gate.open()
    tiers.will_change(taken)  # a new gradient lands
    settle_transfers(tiers)
    assert going.state is BlockState.EMPTY and going.offset is None
    assert taken.state is BlockState.DIRTY


def test_a_write_of_what_nobody_wants_fails(make_rig: Callable[..., Rig]) -> None:
    tiers = make_rig(4 * PAGE_BYTES, faults=f"op=write errno={errno.EIO}").tiers
    block = fill(tiers, "layer.grad")
    assert tiers.write_behind(block)
    tiers.transfers.discard_soon(block)
    settle_transfers(tiers)
    assert block.state is BlockState.EMPTY


def test_removed_block_is_refused() -> None:
    tiers = TierManager(Arena(2 * PAGE_BYTES), None)
    block = fill(tiers, "layer.weight")
    tiers.remove(block)
    with pytest.raises(ClosedError, match=r"layer\.weight \(weight\) is gone"):
        tiers.acquire(block)
    assert block.leases == 0


def test_a_prefetch_that_is_needed_now_overtakes_the_others(
    make_rig: Callable[..., Rig], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(12 * PAGE_BYTES, faults=f"op=read delay_ms=60 {gate.word}")  # four at a time
    promote, promoted = Ticket.promote, threading.Event()

    def promote_and_tell(ticket: Ticket) -> None:
        promote(ticket)
        promoted.set()

    monkeypatch.setattr(Ticket, "promote", promote_and_tell)
    blocks = [fill(rig.tiers, f"block {number}") for number in range(12)]
    rig.tiers.evict_all()
    assert all(rig.tiers.prefetch(block) for block in blocks)
    *_, other, wanted = (block.ticket for block in blocks)
    assert other is not None and wanted is not None
    opener = threading.Thread(target=lambda: promoted.wait(100) and gate.open())
    opener.start()
    rig.tiers.acquire(blocks[-1])
    opener.join()
    assert blocks[-1].state is BlockState.CLEAN
    other.wait(100)
    assert wanted.finished_s < other.finished_s
    rig.tiers.release(blocks[-1])
