"""The compiled I/O module (``csrc/aio``) and memory made for it.

``ffi`` and ``lib`` are cffi's; ``deepoffload.io`` and ``native/neighbour.py`` are their only other users. The engine's
limits are here, where both it and the configuration, which lies below ``io``, see them.
"""

from __future__ import annotations

import os
from typing import Any

from deepoffload.errors import BudgetError, UnsupportedError

try:
    from deepoffload.native._aio import ffi, lib
except ImportError as error:
    raise UnsupportedError(
        f"the compiled module deepoffload.native._aio cannot be loaded ({error}). "
        "Build it with `pip install -e .` (needs a C compiler and Python's headers)."
    ) from error

__all__ = ["PAGE_BYTES", "QUEUE_DEPTH_MAX", "REQUEST_BYTES_MAX", "HostMapping", "ffi", "lib", "round_up"]

PAGE_BYTES: int = lib.DOFF_PAGE
QUEUE_DEPTH_MAX: int = lib.DOFF_QUEUE_DEPTH_MAX
REQUEST_BYTES_MAX = 1 << 30
"""Below Linux's limit of 0x7ffff000 bytes per transfer (read(2), "NOTES")."""


def round_up(nbytes: int, multiple: int = PAGE_BYTES) -> int:
    """The next multiple, ``nbytes`` itself when it is one."""
    return -(-nbytes // multiple) * multiple


class HostMapping:
    """One anonymous mapping: 2 MiB aligned, advised for huge pages, untouched; neither ``fork`` nor core files take it.

    Transfers from and to huge pages are about twice as fast as from scattered 4 KiB pages (a disk takes a limited
    number of memory segments at once). Drop all tensors over ``buffer`` before ``close``.

    Args:
        nbytes: Size; rounded up to whole 4 KiB pages (``nbytes`` then says the rounded size).
        lock: Try ``mlock``. Best effort, because ordinary users may lock 8 MiB: ``lock_errno`` says 0 or why not.
        spare: Addresses to reserve after the memory, in bytes; they have no memory until :meth:`open_spare`.
            Best effort, not with ``lock``: ``spare_bytes`` says how many there are.

    Raises:
        BudgetError: The system refuses so much address space.
    """

    def __init__(self, nbytes: int, *, lock: bool = False, spare: int = 0) -> None:
        self.address = 0
        self.nbytes = round_up(nbytes)
        self.spare_bytes = round_up(spare)
        self._pid = os.getpid()
        address, lock_errno = ffi.new("uint64_t *"), ffi.new("int32_t *")
        if not spare or nbytes <= 0 or lib.doff_map_with_spare(nbytes, spare, address):
            self.spare_bytes = 0
        code = 0
        if not self.spare_bytes:
            code = lib.doff_map(nbytes, lock, address, lock_errno) if nbytes > 0 else -22
        if code:
            raise BudgetError(
                f"the system refuses to map {nbytes} bytes of memory: {os.strerror(-code)}. "
                "Give a smaller host_budget, or raise the limits (ulimit -v, vm.overcommit_memory)."
            )
        self.address = int(address[0])
        self.lock_errno = int(lock_errno[0])
        self._buffer: Any = ffi.buffer(ffi.cast("char *", self.address), self.nbytes)

    def open_spare(self, offset: int, nbytes: int) -> bool:
        """Have spare pages take memory when they are touched; False when the system refuses. Offsets begin with the
        mapping."""
        return lib.doff_spare_open(self.address + offset, nbytes) == 0

    def close_spare(self, offset: int, nbytes: int) -> None:
        """Give the memory of spare pages back to the system."""
        lib.doff_spare_close(self.address + offset, nbytes)

    def forget(self, offset: int, nbytes: int) -> bool:
        """Give the memory of other pages back to the system, which read as zeros then; False when it is locked."""
        return lib.doff_forget(self.address + offset, nbytes) == 0

    @property
    def buffer(self) -> Any:
        """Writable buffer over the mapping, for ``torch.frombuffer`` and ``memoryview``; does not keep the mapping."""
        if not self.address:
            raise BudgetError("this mapping is closed")
        return self._buffer

    def huge_page_bytes(self) -> int:
        """Bytes that lie on huge pages now (``AnonHugePages`` of ``/proc/self/smaps``); 0 when unknown."""
        total, inside = 0, False
        try:
            with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
                for line in smaps:
                    head = line.split(None, 1)[0]
                    if "-" in head and not head.endswith(":"):
                        start, end = (int(part, 16) for part in head.split("-"))
                        # Neighbouring mappings with the same advice are one entry there.
                        inside = start < self.address + self.nbytes and self.address < end
                    elif inside and head == "AnonHugePages:":
                        total += int(line.split()[1]) * 1024
        except OSError:
            return 0
        return min(total, self.nbytes)

    def close(self) -> None:
        """Unmaps; no view may be used afterwards. Idempotent. In a forked child there is nothing to unmap."""
        address, self.address = self.address, 0
        self._buffer = None
        if address and self._pid == os.getpid():
            lib.doff_unmap(address, self.nbytes + self.spare_bytes)

    def __enter__(self) -> HostMapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostMapping({self.nbytes} bytes at {self.address:#x})"
