"""The tier manager against a dictionary: any calls in any order, on a real swap file, with and without failing
transfers.

The dictionary says what every block must contain. A call may fail (no room, or a transfer that the engine was told to
break); then nothing may have changed, also where the manager did something before it failed.
"""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.memory.block import Block
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind
from tests.memory.conftest import Owner, Rig
from tests.support.waiting import settle_transfers

CAPACITY_BYTES = 12 * PAGE_BYTES
BLOCKS_MAX = 9
PICKS = st.integers(0, 999)
SIZES = st.integers(1, 5 * PAGE_BYTES)
KINDS = (BlockKind.WEIGHT, BlockKind.GRADIENT, BlockKind.STATE)
FAULTS = {
    "none": None,
    "late": "seed=5 jitter_us=1500",
    "reads fail": f"op=read every=3 errno={errno.EIO}; seed=2 jitter_us=300",
    "writes fail": f"op=write every=3 errno={errno.ENOSPC}; seed=3 jitter_us=300",
    "half of all fails": f"seed=7 permille=500 errno={errno.EIO}; seed=8 jitter_us=300",
}


@dataclass
class Expected:
    """What the model knows of one block. ``content`` is None while the block is empty."""

    block: Block
    owner: Owner | None
    content: bytes | None = None
    leases: int = 0


@dataclass
class Look:
    """A part of the program that still looks at a block's memory: it must go on seeing these bytes, there."""

    owner: Owner
    offset: int
    content: bytes


@dataclass
class Seen:
    """How often the rarer things happened, over all examples of one test."""

    failures: int = 0
    no_room: int = 0
    limbo: int = 0
    counters: dict[str, float] = field(default_factory=dict)


class TierManagerMachine(RuleBasedStateMachine):
    """``faults`` and ``seen`` are set by the subclass of each test."""

    faults: str | None = None
    nvme_bytes: int | None = None
    seen: Seen

    @initialize(
        poison=st.booleans(),
        order=st.permutations(range(8)),
        blocks=st.lists(st.tuples(SIZES, st.sampled_from(KINDS), st.booleans()), min_size=5, max_size=8),
    )
    def start(self, poison: bool, order: list[int], blocks: list[tuple[int, BlockKind, bool]]) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.rig = Rig(
            Path(self.directory.name), CAPACITY_BYTES, poison=poison, faults=self.faults, nvme_bytes=self.nvme_bytes
        )
        self.tiers = self.rig.tiers
        self.rig.order.say = lambda block_id: order[block_id % len(order)]
        self.expected: list[Expected] = []
        self.looks: list[Look] = []
        self.serial = 0
        for nbytes, kind, owned in blocks:
            self.create(nbytes, kind, owned)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def pick(self, which: int, *, leased: bool | None = None, state: BlockState | None = None) -> Expected | None:
        found = [e for e in self.expected if leased is None or (e.leases > 0) is leased]
        found = [e for e in found if state is None or e.block.state is state]
        return found[which % len(found)] if found else None

    def memory(self, block: Block) -> memoryview:
        assert block.offset is not None
        return self.tiers.arena.view(block.offset, block.nbytes)

    def fresh(self, nbytes: int) -> bytes:
        """Bytes that no other block has, and that are neither zero nor poison."""
        self.serial += 1
        return (self.serial % 250 + 1).to_bytes(1, "little") * (nbytes - 1) + b"\x7f"

    def attempt(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """The call's result, or its error: what it may raise is part of the contract."""
        try:
            return call(*arguments, **named)
        except IoFailure as failure:
            assert self.faults is not None
            assert failure.errno in (errno.EIO, errno.ENOSPC) and failure.filename
            self.seen.failures += 1
            return failure
        except BudgetError as error:
            self.seen.no_room += 1
            assert "must stay" in str(error)
            return error

    # -- what a caller may do ------------------------------------------------------------------------------------------

    @rule(nbytes=SIZES, kind=st.sampled_from(KINDS), owned=st.booleans())
    def create(self, nbytes: int, kind: BlockKind, owned: bool) -> None:
        if len(self.expected) == BLOCKS_MAX:
            return
        owner = Owner() if owned else None
        block = self.tiers.create(f"b{len(self.expected)}", kind, nbytes, owner)
        self.expected.append(Expected(block, owner))

    @rule(which=PICKS, write=st.booleans())
    def use(self, which: int, write: bool) -> None:
        """What a program does nearly always: acquire, perhaps write, release."""
        entry = self.pick(which)
        if entry is not None and self.attempt(self.tiers.acquire, entry.block) is None:
            entry.leases += 1
            entry.content = bytes(entry.block.nbytes) if entry.content is None else entry.content
            if write:
                self.change(entry)
            self.memory_is_right()
            self.tiers.release(entry.block)
            entry.leases -= 1

    @rule(which=PICKS)
    def acquire(self, which: int) -> None:
        entry = self.pick(which)
        if entry is not None and self.attempt(self.tiers.acquire, entry.block) is None:
            entry.leases += 1
            entry.content = bytes(entry.block.nbytes) if entry.content is None else entry.content

    @rule(which=PICKS)
    def acquire_to_overwrite(self, which: int) -> None:
        entry = self.pick(which)
        if entry is not None and self.attempt(self.tiers.acquire, entry.block, load=False) is None:
            entry.leases += 1
            self.change(entry)

    @rule(which=PICKS, tell=st.booleans())
    def mutate(self, which: int, tell: bool) -> None:
        entry = self.pick(which, leased=True)
        if entry is not None:
            self.change(entry, tell=tell)

    def change(self, entry: Expected, *, tell: bool = True) -> None:
        """Write new bytes; an owner may find out by itself, later, that it was written to."""
        if tell or entry.owner is None:
            failure = self.attempt(self.tiers.will_change, entry.block)
            if failure is not None:  # an older write failed: the block is dirty again, which is what was wanted
                assert entry.block.state is BlockState.DIRTY
        else:
            self.show(entry)
            entry.owner.wrote = True
        entry.content = self.fresh(entry.block.nbytes)
        self.memory(entry.block)[:] = entry.content
        for look in self.looks:
            if look.owner is entry.owner and look.offset == entry.block.offset:
                look.content = entry.content

    def show(self, entry: Expected) -> None:
        """From here on the program may write without saying so."""
        if entry.owner is not None and not entry.owner.installed:
            self.tiers.guards.before_showing(entry.block)
            entry.owner.installed = True

    @rule(which=PICKS)
    def release(self, which: int) -> None:
        entry = self.pick(which, leased=True)
        if entry is not None:
            self.tiers.release(entry.block)
            entry.leases -= 1

    @rule(which=PICKS)
    def look_at(self, which: int) -> None:
        """The program takes a view of leased memory and keeps it after the lease."""
        entry = self.pick(which, leased=True)
        if entry is not None and entry.owner is not None and entry.block.offset is not None:
            self.show(entry)
            entry.owner.references += 1
            assert entry.content is not None
            self.looks.append(Look(entry.owner, entry.block.offset, entry.content))

    @rule(which=PICKS)
    def look_away(self, which: int) -> None:
        if not self.looks:
            return
        look = self.looks.pop(which % len(self.looks))
        look.owner.references -= 1

    @rule(which=PICKS)
    def prefetch(self, which: int) -> None:
        entry = self.pick(which, state=BlockState.ON_NVME)
        if entry is not None:
            assert self.tiers.prefetch(entry.block) is (entry.block.state is BlockState.READING)

    @rule(which=PICKS)
    def write_behind(self, which: int) -> None:
        entry = self.pick(which, state=BlockState.DIRTY)
        if entry is not None and self.tiers.write_behind(entry.block):
            assert entry.leases == 0

    @rule(which=PICKS)
    def evict(self, which: int) -> None:
        entry = self.pick(which)
        if entry is not None:
            held = (
                entry.leases
                or entry.block.id in self.tiers.static
                or (entry.owner is not None and entry.owner.references)
            )
            gone = self.attempt(self.tiers.evict, entry.block)
            if gone is True:
                assert not held and entry.block.offset is None
            elif gone is False:
                assert held or entry.block.offset is None

    @rule(which=PICKS)
    def discard(self, which: int) -> None:
        """An owner drops its blocks itself, so this happens without leases only; views may be left behind."""
        entry = self.pick(which, leased=False)
        if entry is not None:
            assert self.attempt(self.tiers.discard, entry.block) is None
            self.forget(entry)

    def forget(self, entry: Expected) -> None:
        entry.content = None
        if entry.owner is not None:
            self.seen.limbo += entry.owner.references > 0
            replacement = Owner()  # what was shown is the old owner's; the block is shown again
            entry.block.owner = entry.owner = replacement

    @rule(which=PICKS)
    def remove(self, which: int) -> None:
        entry = self.pick(which, leased=False)
        if entry is not None:
            assert self.attempt(self.tiers.remove, entry.block) is None
            self.expected.remove(entry)

    @rule(which=PICKS)
    def make_static(self, which: int) -> None:
        entry = self.pick(which)
        if entry is not None and (entry.block.id in self.tiers.static or which % 3 == 0):
            self.tiers.static ^= {entry.block.id}

    @rule()
    def evict_all(self) -> None:
        self.attempt(self.tiers.evict_all)

    @rule()
    def poll(self) -> None:
        self.attempt(self.tiers.poll)

    @rule()
    def settle_transfers(self) -> None:
        self.attempt(settle_transfers, self.tiers)

    # -- what holds always ---------------------------------------------------------------------------------------------

    @invariant()
    def memory_is_right(self) -> None:
        for entry in getattr(self, "expected", []):
            block = entry.block
            assert block.leases == entry.leases
            assert (entry.content is None) == (block.state is BlockState.EMPTY)
            assert block.resident or entry.leases == 0
            if block.resident:
                assert bytes(self.memory(block)) == entry.content, block
            if entry.owner is not None and entry.owner.offset is not None:
                assert entry.owner.offset == block.offset
        for look in getattr(self, "looks", []):
            assert bytes(self.tiers.arena.view(look.offset, len(look.content))) == look.content

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "tiers"):
            return
        arena = self.tiers.arena
        assert arena.used_bytes <= arena.peak_bytes <= CAPACITY_BYTES
        assert {b.id for b in self.tiers.blocks()} == {e.block.id for e in self.expected}
        assert {b.id for b in self.tiers.resident()} == {
            e.block.id for e in self.expected if e.block.offset is not None
        }
        if not self.looks:
            held = sum(arena.size_of(b.offset) for b in self.tiers.resident() if b.offset is not None)
            # What was discarded while the program looked at it is taken back when room is needed.
            assert held <= arena.used_bytes

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        try:
            self.read_everything_back()
        finally:
            for name, value in vars(self.tiers.counters).items():
                self.seen.counters[name] = self.seen.counters.get(name, 0) + value
            self.rig.close()
            left = list(Path(self.directory.name).iterdir())
            self.directory.cleanup()
        assert left == []

    def read_everything_back(self) -> None:
        """However it ended, every block can be had again; transfers that keep failing are tried again."""
        for look in self.looks:
            look.owner.references -= 1
        for entry in self.expected:
            self.tiers.static.discard(entry.block.id)
            while entry.leases:
                self.tiers.release(entry.block)
                entry.leases -= 1
        for entry in self.expected:
            for _ in range(200):
                if self.attempt(self.tiers.acquire, entry.block) is None:
                    break
            else:
                pytest.fail(f"{entry.block} cannot be had again")
            assert bytes(self.memory(entry.block)) == (entry.content or bytes(entry.block.nbytes))
            self.tiers.release(entry.block)


WALK: dict[str, tuple[float, tuple[str, ...]]] = {
    # Rare are those that fill the memory with what must stay, and those that leave nothing to find.
    "use": (12, ("which", "write")),
    "acquire": (2, ("which",)),
    "acquire_to_overwrite": (1, ("which",)),
    "mutate": (2, ("which", "tell")),
    "release": (6, ("which",)),
    "look_at": (2, ("which",)),
    "look_away": (3, ("which",)),
    "prefetch": (4, ("which",)),
    "write_behind": (4, ("which",)),
    "evict": (4, ("which",)),
    "discard": (2, ("which",)),
    "remove": (0.5, ("which",)),
    "create": (0.5, ("nbytes", "kind", "owned")),
    "make_static": (0.5, ("which",)),
    "evict_all": (0.3, ()),
    "poll": (1, ()),
    "settle_transfers": (0.3, ()),
}
"""How often a long walk takes each rule, and the rule's arguments."""

DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "which": lambda dice: dice.randrange(1000),
    "write": lambda dice: dice.random() < 0.5,
    "tell": lambda dice: dice.random() < 0.5,
    "owned": lambda dice: dice.random() < 0.5,
    "kind": lambda dice: dice.choice(KINDS),
    "nbytes": lambda dice: dice.randint(1, 5 * PAGE_BYTES),
}


def walk(machine: TierManagerMachine, seed: int, steps: int) -> None:
    """Many more steps in a row than hypothesis takes: holes, views and half-done transfers pile up."""
    dice = random.Random(seed)
    blocks = [(DRAWN["nbytes"](dice), DRAWN["kind"](dice), DRAWN["owned"](dice)) for _ in range(8)]
    machine.start(poison=dice.random() < 0.5, order=dice.sample(range(8), 8), blocks=blocks)
    try:
        for name in dice.choices(list(WALK), [weight for weight, _ in WALK.values()], k=steps):
            getattr(machine, name)(**{argument: DRAWN[argument](dice) for argument in WALK[name][1]})
            machine.memory_is_right()
            machine.books_are_right()
    finally:
        machine.teardown()


def machine_class(faults: str) -> tuple[Any, Seen]:
    seen = Seen()
    return type("Machine", (TierManagerMachine,), {"faults": FAULTS[faults], "seen": seen}), seen


@pytest.mark.parametrize("faults", FAULTS)
def test_contents_are_always_right(faults: str) -> None:
    machine, _ = machine_class(faults)
    machine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=80,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes: every example starts an engine
    )
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("faults", FAULTS)
def test_long_walks(faults: str) -> None:
    machine, seen = machine_class(faults)
    for seed in range(8):
        walk(machine(), seed, 2000)
    # The walks reached what they are for.
    for name in ("faults", "waits", "prefetches", "evictions", "compactions"):
        assert seen.counters[name] > 20, (name, seen)
    assert seen.no_room > 20 and seen.limbo > 0
    assert (seen.failures > 20) is ("fail" in faults)
