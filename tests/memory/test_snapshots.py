"""Snapshots against the model of the tier manager: the bytes of the cut are copied out. The program may do anything
after the cut."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.memory.block import Block
from deepoffload.memory.snapshots import Snapshot
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.block_state import BlockState
from tests.memory import test_tier_manager_model as model
from tests.memory.test_tier_manager_model import FAULTS, PICKS, Seen, TierManagerMachine

TIGHT_BYTES = (model.BLOCKS_MAX + 1) * 5 * PAGE_BYTES
"""Of disk: enough for every block, not for frozen extents as well."""


class Collected:
    """Takes the bytes of one block, in order."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.data = b""

    def put(self, start: int, address: int, nbytes: int) -> None:
        assert start == len(self.data) and not (self.whole and start)
        self.data += ctypes.string_at(address, nbytes)


class Owner:
    """What a save is to its snapshot."""

    def __init__(self) -> None:
        self.hurry = self.ride = False
        self.error: Exception | None = None

    def failed(self, error: Exception) -> None:
        self.error = error

    def may_ride(self) -> bool:
        return self.hurry or self.ride

    def is_hurried(self) -> bool:
        return self.hurry

    def finish(self) -> None:
        raise AssertionError("nobody closes the memory here")

    def wake(self) -> None:
        pass


class SnapshotMachine(TierManagerMachine):
    """The model with cuts in it.

    Attributes:
        due: what each block held at the cut; None: the update is still to come.
    """

    snapshot: Snapshot | None = None
    total = 0

    @rule(coming=st.integers(0, 2**9 - 1), whole=st.integers(0, 2**9 - 1), hurry=st.booleans(), ride=st.booleans())
    def cut(self, coming: int, whole: int, hurry: bool, ride: bool) -> None:
        if self.snapshot is not None:
            self.finish()
        self.owner, self.sinks, self.due = Owner(), {}, {}
        self.owner.hurry, self.owner.ride = hurry, ride
        with self.tiers.lock:
            for entry in self.expected:
                if entry.owner is not None and entry.owner.changed():
                    self.attempt(self.tiers.will_change, entry.block)
            self.snapshot = Snapshot(self.tiers, threading.Lock(), self.owner)
            for number, entry in enumerate(self.expected):
                if entry.content is None:
                    continue
                later = bool(coming >> number & 1)
                self.sinks[entry.block] = Collected(whole=bool(whole >> number & 1))
                self.due[entry.block] = None if later else entry.content
                self.snapshot.freeze(entry.block, self.sinks[entry.block], coming=later)
            self.snapshot.begin()

    @rule(which=PICKS)
    def update(self, which: int) -> None:
        """The update of a block that had one to come."""
        entry = self.pick(which)
        if entry is None or self.snapshot is None or self.due.get(entry.block, b"") is not None:
            return
        if self.attempt(self.tiers.acquire, entry.block) is None:
            entry.leases += 1
            self.change(entry)
            self.due[entry.block] = entry.content
            self.tiers.release(entry.block)
            entry.leases -= 1
            with self.tiers.lock:
                self.tiers.guards.updated(entry.block)

    @rule(count=st.integers(1, 5))
    def copy(self, count: int) -> None:
        for _ in range(count):
            if self.snapshot is not None:
                self.snapshot.step()
                self.look_for_the_end()

    @rule()
    def finish(self) -> None:
        """Somebody waits for it."""
        if self.snapshot is None:
            return
        self.owner.hurry = True
        for block, content in list(self.due.items()):
            number = next((n for n, entry in enumerate(self.expected) if entry.block is block), None)
            if content is None and number is not None:
                self.tiers.static.discard(block.id)
                for _ in range(100):
                    self.update(number)
                    if self.due[block] is not None:
                        break
                else:
                    return  # no room while so much is in use
        for _ in range(1000):
            if self.owner.error is not None or self.snapshot.left == 0:
                break
            if self.snapshot.step() == 0:
                self.attempt(model.settle_transfers, self.tiers)
        self.look_for_the_end()
        assert self.snapshot is None, self.snapshot

    def look_for_the_end(self) -> None:
        snapshot, error = self.snapshot, self.owner.error
        if snapshot is None or (error is None and snapshot.left):
            return
        self.snapshot = None
        snapshot.end()
        assert not self.tiers.guards and self.rig.space.used_bytes <= TIGHT_BYTES
        if error is None:
            for block, content in self.due.items():
                assert self.sinks[block].data == content, block
            self.seen.counters["snapshots"] = self.seen.counters.get("snapshots", 0) + 1
            return
        lost = isinstance(error, RuntimeError) and "before its update was made" in str(error)
        no_room = isinstance(error, BudgetError) and "must stay" in str(error)  # what is gathered has to come to memory
        assert lost or no_room or (isinstance(error, IoFailure) and self.faults is not None), error

    @invariant()
    def ended_if_it_failed(self) -> None:
        if self.snapshot is not None:
            self.look_for_the_end()

    def remove(self, which: int) -> None:
        entry = self.pick(which, leased=False)
        super().remove(which)
        if entry is not None and self.snapshot is not None and self.due.get(entry.block, b"") is None:
            assert self.owner.error is not None

    def teardown(self) -> None:
        if self.snapshot is not None:
            self.snapshot.end()
            self.snapshot = None
        super().teardown()


def machine_class(faults: str, *, tight: bool = False) -> tuple[Any, Seen]:
    seen = Seen()
    settings = {"faults": FAULTS[faults], "seen": seen, "nvme_bytes": TIGHT_BYTES if tight else None}
    return type("Machine", (SnapshotMachine,), settings), seen


@pytest.mark.parametrize("faults", ["none", "half of all fails"])
def test_what_is_copied_is_of_the_cut(faults: str) -> None:
    machine, _ = machine_class(faults)
    machine.TestCase.settings = settings(
        max_examples=15,
        stateful_step_count=80,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    machine.TestCase("runTest").runTest()


def walk(machine: SnapshotMachine, seed: int, steps: int, *, in_thread: bool) -> None:
    """The walk of the model, with cuts, copies and updates in between; the copies also in a separate thread."""
    dice = random.Random(seed)
    blocks = [(model.DRAWN["nbytes"](dice), model.DRAWN["kind"](dice), model.DRAWN["owned"](dice)) for _ in range(8)]
    machine.start(poison=dice.random() < 0.5, order=dice.sample(range(8), 8), blocks=blocks)
    over = threading.Event()

    def copy() -> None:
        while not over.wait(0.0005):
            snapshot = machine.snapshot
            if snapshot is not None:
                snapshot.step()

    thread = threading.Thread(target=copy)
    if in_thread:
        thread.start()
    weights = {**{name: weight for name, (weight, _) in model.WALK.items()}, "cut": 1.0, "update": 4.0, "copy": 4.0}
    try:
        for name in dice.choices(list(weights), list(weights.values()), k=steps):
            with machine.tiers.lock if in_thread and name != "finish" else contextlib.nullcontext():
                if name == "cut":
                    pass
                elif name == "update":
                    machine.update(dice.randrange(1000))
                elif name == "copy":
                    machine.copy(dice.randint(1, 5))
                else:
                    getattr(machine, name)(**{a: model.DRAWN[a](dice) for a in model.WALK[name][1]})
                machine.ended_if_it_failed()
                machine.memory_is_right()
                machine.books_are_right()
            if name == "cut":
                machine.cut(dice.randrange(512), dice.randrange(512), dice.random() < 0.2, dice.random() < 0.5)
    finally:
        over.set()
        if in_thread:
            thread.join()
        machine.teardown()


@pytest.mark.parametrize("in_thread", [False, True], ids=["alone", "in_a_thread"])
@pytest.mark.parametrize(
    ("faults", "tight"),
    [("none", False), ("none", True), ("late", True), ("reads fail", False), ("writes fail", True)],
)
def test_long_walks(faults: str, tight: bool, in_thread: bool) -> None:
    machine, seen = machine_class(faults, tight=tight)
    for seed in range(3):
        walk(machine(), seed, 800, in_thread=in_thread)
    assert seen.counters["snapshots"] > (3 if "fail" in faults else 12), seen


def test_an_extent_is_frozen_until_it_is_copied(make_rig: Any) -> None:
    rig = make_rig(4 * PAGE_BYTES)
    block = rig.tiers.create("b", model.BlockKind.STATE, PAGE_BYTES)

    def write(value: int) -> None:
        rig.tiers.acquire(block)
        rig.tiers.will_change(block)
        rig.tiers.arena.view(block.offset, PAGE_BYTES)[:] = bytes([value]) * PAGE_BYTES
        rig.tiers.release(block)
        assert rig.tiers.evict(block)

    write(1)
    first = block.extent
    owner, sink = Owner(), Collected(whole=False)
    snapshot = Snapshot(rig.tiers, threading.Lock(), owner)
    with rig.tiers.lock:
        snapshot.freeze(block, sink, coming=False)
        snapshot.begin()
    assert not rig.space.is_frozen(first)
    write(2)
    assert block.extent != first and rig.space.used_bytes == 2 * PAGE_BYTES
    write(3)
    assert rig.space.used_bytes == 2 * PAGE_BYTES
    assert snapshot.step() == PAGE_BYTES and snapshot.left == 0 and snapshot.step() == 0
    assert sink.data == bytes([1]) * PAGE_BYTES and rig.space.used_bytes == PAGE_BYTES
    snapshot.end()
    assert owner.error is None and block.state is BlockState.ON_NVME


def test_what_is_in_memory_is_not_read_again(make_rig: Any) -> None:
    rig = make_rig(8 * PAGE_BYTES)
    blocks: list[Block] = [rig.tiers.create(f"b{n}", model.BlockKind.STATE, PAGE_BYTES) for n in range(3)]
    for block in blocks:
        rig.tiers.acquire(block)
        rig.tiers.release(block)
    rig.tiers.evict(blocks[0])
    assert rig.tiers.write_behind(blocks[1])
    model.settle_transfers(rig.tiers)
    states = [block.state for block in blocks]
    assert states == [BlockState.ON_NVME, BlockState.CLEAN, BlockState.DIRTY]
    owner = Owner()
    snapshot = Snapshot(rig.tiers, threading.Lock(), owner)
    with rig.tiers.lock:
        for block in blocks:
            snapshot.freeze(block, Collected(whole=False), coming=False)
        snapshot.begin()
    before = rig.space.bytes_read
    while snapshot.left:
        assert snapshot.step()
    assert rig.space.bytes_read - before == snapshot.read_bytes == PAGE_BYTES
    snapshot.end()
