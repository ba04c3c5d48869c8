"""What a pager wants of its engine, for tests that put the parts of one together themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from deepoffload.copies.host_link import host_offset
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit


class PagerOwner:
    """Stands in an engine's place. What is made after it sets ``tiers`` and ``pager``, and puts what ends with them on
    ``_last``."""

    tiers: TierManager
    pager: Pager

    def __init__(self) -> None:
        self._last = ExitStack()

    @property
    def units(self) -> list[Unit]:
        return self.pager.units

    @contextmanager
    def held(self, block: Block) -> Iterator[None]:
        """Its stored bytes are in the arena, with what the program has written of them."""
        self.pager.memory.settle(block)
        self.tiers.acquire(block)
        try:
            yield
        finally:
            self.tiers.release(block)

    def stored_bytes(self, block: Block) -> Tensor:
        """A copy of the bytes that a block stores."""
        with self.held(block):
            return self._in_arena(block).clone()

    def _in_arena(self, block: Block) -> Tensor:
        start = host_offset(block)
        return torch.frombuffer(self.tiers.arena.buffer, dtype=torch.uint8)[start : start + block.nbytes]

    def adopt_late(self, param: Tensor, name: str) -> ParamHandle | None:
        return None

    def adopt_newcomers(self) -> None:
        """Nothing comes."""

    def all_dead(self) -> None:
        """The test ends it."""

    def close(self) -> None:
        self.pager.life.close("the test is over")
        self.pager.life.ignore_deaths()
        self._last.close()
