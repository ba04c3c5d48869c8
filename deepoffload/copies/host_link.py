"""The way between the arena and a device: bytes in both directions, and what of them is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.in_flight import DeviceTransfers
from deepoffload.copies.pinning import PinnedArena
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager


def host_offset(block: Block) -> int:
    """Where the stored bytes of a resident block lie in the arena."""
    if block.offset is None:
        raise RuntimeError(f"block {block.name} has no memory")
    return block.offset


class HostLink:
    """Copies ranges of the arena to a device and back. Guarded by the tier manager's lock.

    Attributes:
        transfers: the copies that are under way. The caller of :meth:`bring` and :meth:`take` tells it of them.
        pinned: what of the arena is page-locked.
        at_close: called when nothing is under way any more.
    """

    def __init__(self, tiers: TierManager, accelerator: ComputeDevice) -> None:
        self.tiers = tiers
        self.accelerator = accelerator
        self.transfers = DeviceTransfers(tiers)
        self.pinned = PinnedArena(accelerator, tiers.arena)
        self.at_close: list[Callable[[], None]] = []
        self._arena_bytes: Tensor | None = None

    def bring(self, there: Tensor, offset: int) -> None:
        """Start copying the arena's bytes from ``offset`` on to ``there`` (uint8, on the device), in the current
        stream. To be called outside of the program's modes."""
        for part, host in self._parts(there, offset):
            part.copy_(host, non_blocking=True)

    def take(self, there: Tensor, offset: int) -> None:
        """The other way round."""
        for part, host in self._parts(there, offset):
            host.copy_(part, non_blocking=True)

    def _parts(self, there: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self._arena_bytes is None:
            self._arena_bytes = torch.frombuffer(self.tiers.arena.buffer, dtype=torch.uint8)
        for start, nbytes in self.pinned.lock(offset, there.numel()):
            yield there[start - offset :][:nbytes], self._arena_bytes[start : start + nbytes]

    @contextmanager
    def lease_kept(self, block: Block, stream: Any) -> Iterator[None]:
        """What is launched inside, on ``stream``, takes the lease of ``block`` over, if all of it is launched. Else the
        lease ends when the part that was is done."""
        try:
            yield
        except BaseException:
            self.accelerator.event(stream).synchronize()
            self.tiers.release(block)
            raise

    def close(self) -> None:
        """Wait for the device and for what is under way, and unlock the arena."""
        self.accelerator.synchronize()
        self.transfers.end()
        for close in self.at_close:
            close()
        self.at_close.clear()
        self._arena_bytes = None
        self.pinned.release()
