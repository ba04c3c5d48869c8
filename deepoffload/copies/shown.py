"""The memory that tensors show: the arena itself where the CPU computes, a device's copies of blocks elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from deepoffload.io.checksums import crc32c
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager


class ShownMemory(Protocol):
    """What doors, windows and slots ask of the memory that tensors show. It has many methods, because all of them ask
    it: each is one question.

    Attributes:
        device: where the tensors are.
        on_host: it is the arena; there are no copies of anything.
        capacity_bytes: of copies; 0 where the arena is what tensors show.
        device_bytes: the device budget; 0 where copies lie in the arena, too.
    """

    device: torch.device
    on_host: bool

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    def is_captured(self) -> bool:
        """Whether the program captures a graph of what it launches now."""

    def reserve(self, needed_bytes: int, scratch_bytes: int = 0, arriving_bytes: int = 0) -> None:
        """Take the memory now, and no more of the budget than ``needed_bytes``, of which ``scratch_bytes`` are for
        updates there. ``arriving_bytes``: of the host's, for what comes from other ranks. Raises
        ``torch.OutOfMemoryError``, or BudgetError where it is the host's memory that is too small."""

    def scratch(self) -> Tensor:
        """What updates in this memory need meanwhile: uint8, to be overwritten by what is launched now."""

    @property
    def acquire(self) -> Callable[..., None]:
        """``acquire(block, *, load=True)``: the bytes are there, and stay until ``release``. See
        :meth:`TierManager.acquire`, which says what it raises."""

    @property
    def release(self) -> Callable[[Block], None]: ...

    def acquire_to_change(self, block: Block, *, load: bool = True) -> None:
        """The same where the caller launches changes of the bytes now: they come after what other streams do with
        them."""

    @property
    def will_change(self) -> Callable[[Block], None]:
        """Call before the shown bytes of an acquired block change; they alone are right then. Raises
        ``UnsupportedError`` where they cannot be taken back to what is stored, which is shown again then."""

    @property
    def all_stay(self) -> Callable[[], bool]:
        """True when nothing that is shown will ever be moved."""

    def flat(self, block: Block, offset_bytes: int, dtype: torch.dtype, numel: int) -> Tensor:
        """``numel`` elements of a block that is there, as a tensor with its own storage. ``offset_bytes`` is one of
        the shown bytes."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory."""

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        """Of a part of the shown bytes of a block that is there."""

    def is_idle(self, block: Block) -> bool:
        """Whether no copy of a block is in use, seen by the program or on its way; also where there are no copies."""

    def is_used_elsewhere(self, block: Block) -> bool:
        """Whether another thread is in the middle of a use: what it has been shown must not go away under it."""

    def settle(self, block: Block) -> None:
        """From now on, and until somebody writes to what is shown, the host's bytes of the block are right."""

    def refresh(self, block: Block) -> None:
        """The host's bytes of a block were changed: everything that shows it has to show these."""

    def keeps(self, block: Block) -> bool:
        """Whether a block of optimizer state lives in this memory, to be updated there."""

    def keep(self, block: Block) -> None:
        """From now on a block of optimizer state lives in this memory. What the host has of it goes there."""

    def keep_no_longer(self, block: Block) -> None:
        """The block lives on the host again."""

    def let_host_go(self, block: Block) -> None:
        """What is shown of a block that is kept was changed: the host's bytes of it are wrong, and are freed."""

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Bring what is used next nearer, where that needs no waiting. ``upcoming`` as for ``plan_prefetch``."""

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Drop every copy that may go (tests)."""

    def finish_rewrites(self) -> None:
        """Wait until what the program has views of shows what is stored, also by other ranks."""

    def stats(self) -> dict[str, float]:
        """Numbers of the run so far, of a device's memory; none of the arena's."""

    def close(self) -> None:
        """Give back what it holds. Nothing is under way any more when this returns. Idempotent."""


class HostMemory:
    """The arena, shown as it is."""

    on_host = True
    capacity_bytes = 0
    device_bytes = 0

    def __init__(self, tiers: TierManager) -> None:
        self.device = torch.device("cpu")
        self._arena = tiers.arena
        self.acquire = tiers.acquire  # bound once: a window's entry pays for every call
        self.release = tiers.release
        self.will_change = tiers.will_change
        self.all_stay = tiers.all_stay

    def is_captured(self) -> bool:
        return False

    def reserve(self, needed_bytes: int, scratch_bytes: int = 0, arriving_bytes: int = 0) -> None:
        """Nothing to do: the arena is there."""

    def scratch(self) -> Tensor:
        raise RuntimeError("nothing is updated here by operators of torch")

    def acquire_to_change(self, block: Block, *, load: bool = True) -> None:
        self.acquire(block, load=load)

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
        return crc32c(self._arena.address + block.offset + offset_bytes, nbytes)

    def is_idle(self, block: Block) -> bool:
        return True

    def is_used_elsewhere(self, block: Block) -> bool:
        return block.leases > 0 and block.leased_by != threading.get_ident()

    def settle(self, block: Block) -> None:
        """Nothing to do: what is shown are the host's bytes."""

    def refresh(self, block: Block) -> None:
        """Nothing to do, likewise."""

    def keeps(self, block: Block) -> bool:
        return False  # state is paged like everything else

    def keep(self, block: Block) -> None:
        raise RuntimeError(f"{block.name}: the arena pages state like everything else, and has no room for it alone")

    def keep_no_longer(self, block: Block) -> None:
        """Nothing to do: it lives on the host."""

    def let_host_go(self, block: Block) -> None:
        """Nothing to do: the host's bytes are those that were changed."""

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Nothing to do: what is in the arena is as near as it gets."""

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Nothing to do: there are no copies."""

    def finish_rewrites(self) -> None:
        """Nothing to do, likewise."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to do: the tier manager closes the arena."""
