"""The memory of other processes of this host (``csrc/aio/neighbour.c``), and the board through which they agree.

Every failure is an ``OSError`` of the class that belongs to its errno: ``PermissionError`` (this process may not read
that one), ``ProcessLookupError`` (it is gone), ``TimeoutError``; ESTALE when another process has its number now,
ESHUTDOWN when its board is closed. The calls release the GIL. The caller keeps memory alive.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from deepoffload.native.aio import ffi, lib

BOARD_SLOTS: int = lib.DOFF_BOARD_SLOTS
"""Transfers that may be under way at once."""

YAMA_SCOPE_PATH = "/proc/sys/kernel/yama/ptrace_scope"


class BoardAddress(NamedTuple):
    """What others must know of a board."""

    pid: int
    address: int
    token: bytes


class Offer(NamedTuple):
    """Bytes that a process lets others read."""

    address: int
    nbytes: int


def _check(code: int, action: str) -> None:
    if code:
        raise OSError(-code, f"{action}: {os.strerror(-code)}")


def readers_need_leave() -> bool:
    """Whether the security module yama restricts here who may read whose memory, and leave can be given."""
    try:
        with open(YAMA_SCOPE_PATH, encoding="ascii") as scope:
            return scope.read().strip() == "1"
    except OSError:
        return False  # no yama


def allow_readers(allowed: bool) -> None:
    """Let other processes of this user read this one's memory where yama restricts that, or no longer.

    Raises:
        OSError: the kernel refuses; EINVAL where there is no yama.
    """
    _check(lib.doff_neighbours_allow(allowed), "prctl(PR_SET_PTRACER)")


class Board:
    """What this process offers to its neighbours and has taken from them. Transfers have numbers from 1 on, which all
    of them count alike; one number in ``BOARD_SLOTS`` has the same slot, so it waits for the one before."""

    def __init__(self) -> None:
        self._board: Any = ffi.new("doff_board *")
        self.token = os.urandom(lib.DOFF_TOKEN_BYTES)
        ffi.memmove(self._board.token, self.token, len(self.token))

    @property
    def address(self) -> BoardAddress:
        return BoardAddress(os.getpid(), int(ffi.cast("uintptr_t", self._board)), self.token)

    def offer(self, number: int, address: int, nbytes: int) -> None:
        """Let the others read these bytes, which stay there until all have taken them."""
        lib.doff_board_offer(self._board, number, address, nbytes)

    def taken(self, number: int) -> None:
        """Say that this process has read all that it wants of this transfer."""
        lib.doff_board_taken(self._board, number)

    def close(self) -> None:
        """Withdraw what is offered, and say that nothing more comes. A process that still reads offered bytes gets an
        error. The board's memory stays as long as this object."""
        lib.doff_board_close(self._board)


class NeighbourMemory:
    """Another process of this host, as one that can read its memory sees it."""

    def __init__(self, board: BoardAddress) -> None:
        self.pid = board.pid
        self._neighbour: Any = ffi.new("doff_neighbour *", {"pid": board.pid, "board": board.address})
        ffi.memmove(self._neighbour.token, board.token, lib.DOFF_TOKEN_BYTES)

    def probe(self) -> None:
        """Read its token: fails where it is another process, or may not be read."""
        _check(lib.doff_neighbour_read(self._neighbour, 0, 0, 0), f"reading the token of process {self.pid}")

    def read(self, source: int, target: int, nbytes: int) -> None:
        """Copy ``nbytes`` from its address ``source`` to ours. After an error the target holds anything."""
        code = lib.doff_neighbour_read(self._neighbour, source, target, nbytes)
        _check(code, f"reading {nbytes} bytes of process {self.pid}")

    def await_offer(self, number: int, timeout_ms: int) -> Offer:
        """Wait until it offers its part of this transfer."""
        found = ffi.new("doff_offer *")
        code = lib.doff_neighbour_offer(self._neighbour, number, timeout_ms, found)
        _check(code, f"waiting for what process {self.pid} offers")
        return Offer(found.address, found.nbytes)

    def await_taken(self, number: int, timeout_ms: int) -> None:
        """Wait until it has read all that it wants of this transfer."""
        code = lib.doff_neighbour_taken(self._neighbour, number, timeout_ms)
        _check(code, f"waiting until process {self.pid} has read")
