"""What this process takes: for programs of tests, which run in a process that does nothing else."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

from deepoffload.memory.arena import Arena

INTERVAL_S = 0.002
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""


def resident_bytes() -> int:
    """RssAnon + RssShmem of ``/proc/self/status``: without the pages of files that are mapped."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


def give_back() -> None:
    """What is free by now goes back to the system, so that it is not counted against what comes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def populate(arena: Arena) -> bool:
    """All of the budget counts as used from here on; its contents stay. False where the kernel cannot do that."""
    address, nbytes = ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.capacity_bytes)
    return not ctypes.CDLL(None).madvise(address, nbytes, POPULATE_WRITE)


class MemoryWatch:
    """Looks at the memory of its process all the time."""

    def __init__(self) -> None:
        self._peak_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            with self._lock:
                self._peak_bytes = max(self._peak_bytes, resident_bytes())
            time.sleep(INTERVAL_S)

    def take_peak(self) -> int:
        """The most since the last call, or since the start, in bytes."""
        with self._lock:
            peak_bytes = max(self._peak_bytes, resident_bytes())
            self._peak_bytes = 0
        return peak_bytes
