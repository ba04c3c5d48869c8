"""Reads a process's memory, its own, while process_vm_readv is short, interrupted or empty (``vm_read_faults.c``)."""

from __future__ import annotations

import ctypes
import errno
import os

from deepoffload.native.aio import HostMapping
from deepoffload.native.neighbour import Board, NeighbourMemory

NBYTES = 100_003
FOREVER = 1 << 40


def main() -> None:
    faults = ctypes.CDLL(None)
    faults.vm_read_faults.argtypes = [ctypes.c_ulong, ctypes.c_long, ctypes.c_long]
    faults.vm_read_calls.restype = ctypes.c_long
    board = Board()
    itself = NeighbourMemory(board.address)
    with HostMapping(NBYTES) as source, HostMapping(NBYTES) as target:
        source.buffer[:NBYTES] = os.urandom(NBYTES)
        for at_most, interrupted in ((1000, 0), (1, 0), (0, 5), (777, 500)):
            faults.vm_read_faults(at_most, interrupted, 0)
            target.buffer[:NBYTES] = bytes(NBYTES)
            itself.read(source.address, target.address, NBYTES)
            assert target.buffer[:NBYTES] == source.buffer[:NBYTES]
            assert faults.vm_read_calls() > interrupted + (NBYTES // at_most if at_most else 0)
        for interrupted, headless, code in ((FOREVER, 0, errno.EINTR), (0, 1, errno.EFAULT)):
            faults.vm_read_faults(0, interrupted, headless)
            try:
                itself.read(source.address, target.address, NBYTES)
            except OSError as error:
                assert error.errno == code, error
            else:
                raise AssertionError(f"{errno.errorcode[code]} has not been noticed")
            assert faults.vm_read_calls() < 10_000
        faults.vm_read_faults(1, 3, 0)
        board.offer(1, source.address, NBYTES)
        assert itself.await_offer(1, 0) == (source.address, NBYTES)
    print("all right")


if __name__ == "__main__":
    main()
