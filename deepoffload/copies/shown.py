"""The memory that tensors show: the arena itself where the CPU computes, a device's copies of blocks elsewhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager


class ShownMemory(Protocol):
    """What doors, windows and slots ask of the memory that tensors show.

    Attributes:
        device: where the tensors are.
        on_host: it is the arena; there are no copies of anything.
    """

    device: torch.device
    on_host: bool

    @property
    def acquire(self) -> Callable[..., None]:
        """``acquire(block, *, load=True)``: the bytes are there, and stay until ``release``. See
        :meth:`TierManager.acquire`, which says what it raises."""

    @property
    def release(self) -> Callable[[Block], None]: ...

    @property
    def will_change(self) -> Callable[[Block], None]:
        """Call before the shown bytes of an acquired block change; they alone are right then."""

    @property
    def all_stay(self) -> Callable[[], bool]:
        """True when nothing that is shown will ever be moved."""

    def flat(self, block: Block, offset_bytes: int, dtype: torch.dtype, numel: int) -> Tensor:
        """``numel`` elements of a block that is there, as a tensor with a storage of its own."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory."""

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        """Of the shown bytes of a block that is there."""

    def settle(self, block: Block) -> None:
        """From now on, and until somebody writes to what is shown, the host's bytes of the block are right."""

    def refresh(self, block: Block) -> None:
        """The host's bytes of a block were changed: whatever shows it has to show these."""

    def keeps(self, block: Block) -> bool:
        """Whether a block of optimizer state lives in this memory, to be updated there."""

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Bring what is used next nearer, where that needs no waiting. ``upcoming`` as for ``plan_prefetch``."""

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Drop every copy that may go (tests)."""

    def stats(self) -> dict[str, float]:
        """Numbers of the run so far, of a device's memory; none of the arena's."""


class HostMemory:
    """The arena, shown as it is."""

    on_host = True

    def __init__(self, tiers: TierManager) -> None:
        self.device = torch.device("cpu")
        self._arena = tiers.arena
        self.acquire = tiers.acquire  # bound once: a window's entry pays for every call
        self.release = tiers.release
        self.will_change = tiers.will_change
        self.all_stay = tiers.all_stay

    def flat(self, block: Block, offset_bytes: int, dtype: torch.dtype, numel: int) -> Tensor:
        if block.offset is None:
            raise RuntimeError(f"block {block.name} has no memory")
        return torch.frombuffer(self._arena.buffer, dtype=dtype, count=numel, offset=block.offset + offset_bytes)

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return tensor.device == self.device and self._arena.holds(address)

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        if block.offset is None:
            raise RuntimeError(f"block {block.name} has no memory")
        return zlib.crc32(self._arena.view(block.offset + offset_bytes, nbytes))

    def settle(self, block: Block) -> None:
        """Nothing to do: what is shown are the host's bytes."""

    def refresh(self, block: Block) -> None:
        """Nothing to do, likewise."""

    def keeps(self, block: Block) -> bool:
        return False  # state is paged like everything else

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Nothing to do: what is in the arena is as near as it gets."""

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Nothing to do: there are no copies."""

    def stats(self) -> dict[str, float]:
        return {}
