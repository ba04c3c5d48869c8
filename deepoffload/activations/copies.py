"""The way of an activation between the memory where it was made and its block in the store's part of the arena."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.host_link import HostLink, host_offset
from deepoffload.machine import FreedMemory
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.timeline import Lane


class Brought(Protocol):
    """The bytes of a block, in new memory where the program computes."""

    def here(self) -> Tensor:
        """They are used on the current stream from now on: uint8, all of them."""


class Way(Protocol):
    """Copies bytes to resident blocks and back. Called under the store's lock, outside of the program's modes."""

    def take(self, source: Tensor, block: Block) -> None:
        """Copy ``source`` (uint8, all bytes of a storage) to its block, which is leased until that is done."""

    def bring(self, block: Block) -> Brought:
        """The bytes of a block, in new memory where the program computes."""

    def bring_ahead(self, block: Block) -> None:
        """The block is the next one that is brought."""

    def forget(self, block: Block) -> None:
        """Nobody will ask for the block any more."""

    def poll(self) -> None:
        """Notice copies that have ended."""

    def end_some(self) -> bool:
        """Wait until a copy has ended; False when none was under way."""

    def close(self) -> None:
        """The same, and let go of the arena."""


@dataclass(frozen=True)
class _OnHost:
    whole: Tensor

    def here(self) -> Tensor:
        return self.whole


class HostWay:
    """On a CPU device: a copy is done when its call returns.

    Attributes:
        freed: memory of what the program has let go of, between the copies.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._arena_bytes: Tensor | None = None
        self.freed = FreedMemory()

    def take(self, source: Tensor, block: Block) -> None:
        self._bytes_of(block).copy_(source)
        self.freed.look()  # where it leaves, its block begins: what the one before has made is gone

    def bring(self, block: Block) -> Brought:
        self.freed.look()
        return _OnHost(self._bytes_of(block).clone())

    def bring_ahead(self, block: Block) -> None:
        """Nothing is gained by a copy within one memory that is made early."""

    def forget(self, block: Block) -> None:
        """Nothing is kept."""

    def poll(self) -> None:
        """Nothing is under way."""

    def end_some(self) -> bool:
        return False

    def close(self) -> None:
        self._arena_bytes = None

    def _bytes_of(self, block: Block) -> Tensor:
        if self._arena_bytes is None:
            self._arena_bytes = torch.frombuffer(self._tiers.arena.buffer, dtype=torch.uint8)
        start = host_offset(block)
        return self._arena_bytes[start : start + block.nbytes]


@dataclass(frozen=True)
class _OnDevice:
    """``stream``: on which its memory was allocated, and to which it goes back."""

    block: Block
    whole: Tensor
    accelerator: ComputeDevice
    stream: Any
    arrived: Any

    def here(self) -> Tensor:
        current = self.accelerator.current()
        current.wait_event(self.arrived)
        if current.stream_id != self.stream.stream_id:  # a branch of the model that has a stream of its own
            self.whole.record_stream(current)
        return self.whole


class DeviceWay:
    """Over the link's streams, while the device computes. One block is copied to the device ahead of its use.

    What is copied from the device is kept there until the copy is done. What is copied to it is allocated on the
    stream that computes, so the copy waits for what ran there before, and what runs there next waits for the copy. So
    does every other stream on which it is used.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._ahead: _OnDevice | None = None

    def take(self, source: Tensor, block: Block) -> None:
        accelerator = self._link.accelerator
        stream = accelerator.copy_out
        stream.wait_event(accelerator.event(accelerator.current()))
        self._link.tiers.acquire(block)
        with self._link.lease_kept(block, stream), accelerator.on(stream):
            self._link.take(source, host_offset(block))
        done = partial(_let_go, source)
        self._link.transfers.launched(Lane.FROM_DEVICE, accelerator.event(stream), block, block.nbytes, done)

    def bring(self, block: Block) -> Brought:
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None and ahead.block is block else self._start(block)

    def bring_ahead(self, block: Block) -> None:
        if self._ahead is None or self._ahead.block is not block:
            with suppress(torch.OutOfMemoryError):  # it comes when it is used, when others have gone
                self._ahead = self._start(block)

    def forget(self, block: Block) -> None:
        if self._ahead is not None and self._ahead.block is block:
            self._ahead = None  # the copy itself keeps its memory until it is done
        self._link.transfers.end(block)

    def poll(self) -> None:
        self._link.transfers.poll()

    def end_some(self) -> bool:
        return self._link.transfers.end_some()

    def close(self) -> None:
        self._ahead = None
        self._link.close()

    def _start(self, block: Block) -> _OnDevice:
        accelerator, link = self._link.accelerator, self._link
        link.transfers.end(block)  # its bytes may still be on their way from the device
        there = torch.empty(block.nbytes, dtype=torch.uint8, device=accelerator.device)
        current, stream = accelerator.current(), accelerator.copy_in
        stream.wait_event(accelerator.event(current))
        link.tiers.acquire(block)
        with link.lease_kept(block, stream), accelerator.on(stream):
            link.bring(there, host_offset(block))
        arrived = accelerator.event(stream)
        link.transfers.launched(Lane.TO_DEVICE, arrived, block, block.nbytes, partial(_let_go, there))
        return _OnDevice(block, there, accelerator, current, arrived)


def _let_go(_: Tensor) -> None:
    """A copy is done; the tensor was kept for it until now."""


def all_bytes(tensor: Tensor) -> Tensor:
    """Every byte of a tensor's storage, shown as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
