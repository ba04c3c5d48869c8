"""Tier managers over a small arena and a real swap file, and owners that stand in for tensors."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Alias, Block
from deepoffload.memory.tier_manager import TierManager
from tests.support.waiting import Gate


class GivenOrder:
    """An eviction policy that a test says: the next use of every block, by its id."""

    predicted: frozenset[int] = frozenset()

    def __init__(self, next_use: Callable[[int], float] = lambda block_id: math.inf) -> None:
        self.say = next_use

    def next_use(self, block_id: int) -> float:
        return self.say(block_id)

    def wanted_together(self) -> Sequence[Block]:
        return ()

    def before_leaving(self, block: Block) -> None:
        """Nobody has to know."""


class Owner:
    """What shows a block, reduced to the questions that the tier manager asks.

    Attributes:
        references: how many parts of the program still look at the memory.
        wrote: the program wrote without saying so; :meth:`changed` reports it once.
        offset: where it was told the bytes are now; None when it never had to be told.
        installed: tensors show the bytes.
    """

    def __init__(self) -> None:
        self.references = 0
        self.wrote = False
        self.offset: int | None = None
        self.installed = False

    on_host = True

    def update_to_come(self) -> bool:
        return False

    def may_be_read_unseen(self) -> bool:
        return False

    def can_release(self) -> bool:
        return self.references == 0

    def before_gather(self) -> None:
        """No other rank gathers it."""

    def rewritten(self) -> None:
        """Nobody else rewrites it."""

    def changed(self) -> bool:
        wrote, self.wrote = self.wrote, False
        return wrote

    def aliases(self) -> list[Alias]:
        return [lambda: self.references > 0] if self.references else []

    def release(self) -> None:
        self.offset = None
        self.installed = False

    def relocate(self, offset: int) -> None:
        self.offset = offset


class Rig:
    """A tier manager with everything below it. ``faults`` is a script of the engine's injecting backend."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        poison: bool = True,
        faults: str | None = None,
        nvme_bytes: int | None = None,
    ) -> None:
        self.io = IoEngine(backend="pool", queue_depth=4, fault_script=faults)
        self.space = SwapSpace(self.io, [path], budget_bytes=nvme_bytes)
        self.order = GivenOrder()
        self.tiers = TierManager(Arena(capacity_bytes), self.space, self.order, poison=poison)

    def close(self) -> None:
        self.tiers.close()
        self.space.close()
        self.io.close(timeout_s=100)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs and closes them; their files are gone afterwards."""
    rigs: list[Rig] = []

    def make(capacity_bytes: int, **options: object) -> Rig:
        rigs.append(Rig(tmp_path, capacity_bytes, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
