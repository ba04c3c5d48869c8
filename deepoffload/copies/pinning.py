"""Page-locks the arena, chunk by chunk, as copies come to use it.

Copies from and to page-locked memory overlap with everything else; others go through a small buffer of the driver's. To
lock takes time and takes the memory at once, so only what is really used is locked (``cudaHostRegister``, CUDA
Runtime API, "Memory Management"). CUDA refuses a copy from or to memory that is locked in part, and promises
nothing for one that spans what was locked apart, so a copy is made part by part.
"""

from __future__ import annotations

import logging

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.memory.arena import Arena
from deepoffload.native.aio import PAGE_BYTES

log = logging.getLogger("deepoffload")

CHUNK_BYTES = 64 << 20

HALVINGS = 6
"""A refused registration is tried again with half as much, so often at most: from 64 MiB down to 1 MiB."""

REFUSALS_MAX = 3
"""A driver refuses for a while, or for good: after so many refusals of even the least part in a row, it is asked no
more."""


class PinnedArena:
    """Which parts of the arena are page-locked for a device. Best effort: what is refused is tried again in smaller
    parts, and the log has the end of trying.

    Attributes:
        locked_bytes: how much is.
        refusal: why no more is, if that was tried; None again where a later try went well.
    """

    def __init__(self, accelerator: ComputeDevice, arena: Arena) -> None:
        self._accelerator = accelerator
        self._address = arena.address
        self._capacity_bytes = arena.capacity_bytes
        self._borders: dict[int, list[int]] = {}
        self._locked: list[int] = []
        self._refusals = 0
        self.locked_bytes = 0
        self.refusal: str | None = None
        if accelerator.locks_host_memory:  # the device of ranks locks nothing, and its reference would keep the arena
            arena.before_release(self.release)

    def lock(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Lock what is not locked yet of a range that copies are about to use. Returns the parts of it, as (offset,
        bytes), that may be copied at once."""
        if not self._accelerator.locks_host_memory:
            return [(offset, nbytes)]
        end, bounds = offset + nbytes, [offset]
        for chunk in range(offset // CHUNK_BYTES, (end - 1) // CHUNK_BYTES + 1):
            borders = self._borders.get(chunk)
            if borders is None:
                borders = self._lock_chunk(chunk)
            bounds += [border for border in borders if bounds[-1] < border < end]
        bounds.append(end)
        return [(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]

    def _lock_chunk(self, chunk: int) -> list[int]:
        """Lock a chunk, or as much of it as the driver takes. Returns where its parts begin, locked or not."""
        at = chunk * CHUNK_BYTES
        end, borders = min(at + CHUNK_BYTES, self._capacity_bytes), [at]
        if self._refusals == REFUSALS_MAX:
            return borders
        least_bytes = max(CHUNK_BYTES >> HALVINGS, PAGE_BYTES)
        size, locked = end - at, 0
        while at < end and size >= min(least_bytes, end - at):
            size = min(size, end - at)
            why = self._accelerator.register(self._address + at, size)
            if why is None:
                self._locked.append(at)
                locked += size
                at += size
                borders.append(at)
            else:
                self.refusal, size = why, size // 2 // PAGE_BYTES * PAGE_BYTES
                if not size:
                    break
        if locked:
            self.locked_bytes += locked
            self._borders[chunk] = borders
            self._refusals = 0
        else:  # it is tried again when it is used next
            self._refusals += 1
        if at == end:
            self.refusal = None
        elif self._refusals == REFUSALS_MAX:
            self._say_refused()
        return borders

    def _say_refused(self) -> None:
        log.warning(
            "%s: %d bytes of host memory are page-locked and no more: %s. Copies are slower than they could be",
            self._accelerator.device,
            self.locked_bytes,
            self.refusal,
        )

    def release(self) -> None:
        """Unlock everything. Idempotent; no copy may be under way."""
        for start in self._locked:
            self._accelerator.unregister(self._address + start)
        self._locked.clear()
        self._borders.clear()
        self.locked_bytes = 0
