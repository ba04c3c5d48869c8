"""Page-locks the arena, chunk by chunk, as copies come to use it.

Copies from and to page-locked memory overlap with everything else; others go through a small buffer of the driver's. To
lock takes time and takes the memory at once, so only what is really used is locked (``cudaHostRegister``, CUDA
Runtime API, "Memory Management"). CUDA refuses a copy from or to memory that is locked in part, and promises
nothing for one that spans what was locked apart, so a copy is made chunk by chunk.
"""

from __future__ import annotations

import logging

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.memory.arena import Arena

log = logging.getLogger("deepoffload")

CHUNK_BYTES = 64 << 20


class PinnedArena:
    """Which chunks of the arena are page-locked for a device. Best effort: the first refusal is logged, and the last
    try.

    Attributes:
        locked_bytes: how much is.
        refusal: why no more is, if that was tried.
    """

    def __init__(self, accelerator: ComputeDevice, arena: Arena) -> None:
        self._accelerator = accelerator
        self._address = arena.address
        self._capacity_bytes = arena.capacity_bytes
        self._chunks: set[int] = set()
        self.locked_bytes = 0
        self.refusal: str | None = None
        arena.before_release(self.release)

    def lock(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Lock what is not locked yet of a range that copies are about to use. Returns the parts of it, as (offset,
        bytes), that may be copied at once."""
        if not self._accelerator.locks_host_memory:
            return [(offset, nbytes)]
        chunks = range(offset // CHUNK_BYTES, (offset + nbytes - 1) // CHUNK_BYTES + 1)
        if self.refusal is None:
            self._lock(chunks)
        bounds = [offset, *(chunk * CHUNK_BYTES for chunk in chunks[1:]), offset + nbytes]
        return [(start, end - start) for start, end in zip(bounds, bounds[1:], strict=False)]

    def _lock(self, chunks: range) -> None:
        for chunk in chunks:
            if chunk in self._chunks or self.refusal is not None:
                continue
            start = chunk * CHUNK_BYTES
            size = min(CHUNK_BYTES, self._capacity_bytes - start)
            self.refusal = self._accelerator.register(self._address + start, size)
            if self.refusal is None:
                self._chunks.add(chunk)
                self.locked_bytes += size
            else:
                log.warning(
                    "%s: %d bytes of host memory are page-locked and no more: %s. Copies are slower than they could be",
                    self._accelerator.device,
                    self.locked_bytes,
                    self.refusal,
                )

    def release(self) -> None:
        """Unlock everything. Idempotent; no copy may be under way."""
        for chunk in self._chunks:
            self._accelerator.unregister(self._address + chunk * CHUNK_BYTES)
        self._chunks.clear()
        self.locked_bytes = 0
