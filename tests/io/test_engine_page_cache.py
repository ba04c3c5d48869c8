"""What transfers leave in the page cache: of a direct file nothing, with every alignment (mincore(2))."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

PAGE = 4096
MIB = 1 << 20
FILE_BYTES = 8 * MIB

# Shift of the memory, offset in the file, bytes.
ALIGNED = (0, 0, FILE_BYTES)
CASES = {
    "memory by 1": (1, 0, FILE_BYTES),
    "memory by 512 + 1": (513, MIB, 4 * MIB),
    "memory by a float": (4, PAGE, 3 * MIB + 4 * PAGE),
    "offset": (0, 100, 4 * MIB),
    "offset and memory alike": (100, 100, 4 * MIB),
    "offset and memory unlike": (3, 700, 4 * MIB + 11),
    "tail": (0, 0, 4 * MIB + 17),
    "tail at the end of the file": (0, 4 * MIB, 4 * MIB - 1),
    "inside one block": (0, 5 * PAGE + 1, 100),
    "over a border": (9, 5 * PAGE - 1, 2),
}


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache now."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        first = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (-(-len(view) // mmap.PAGESIZE)))()
        code = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(view)), pages)
        del first
        assert code == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def direct_file(make_engine, backend, tmp_path):
    """An engine, and an empty-cached direct file of random bytes with what it holds."""
    engine = make_engine(backend=backend)
    content = bytearray(os.urandom(FILE_BYTES))
    (tmp_path / "data").write_bytes(content)
    file = engine.open_file(tmp_path / "data")
    if not file.direct:
        pytest.skip(f"no direct I/O on {tmp_path}")
    file.sync()
    descriptor = os.open(file.path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert cached_bytes(tmp_path / "data") == 0
    return engine, file, content


def transfer_both_ways(engine, file, content, memory, case):
    shift, offset, nbytes = case
    address = memory.address + shift
    engine.read(file, address, nbytes, offset).wait()
    assert memory.buffer[shift : shift + nbytes] == content[offset : offset + nbytes]
    content[offset : offset + nbytes] = memory.buffer[shift : shift + nbytes] = os.urandom(nbytes)
    engine.write(file, address, nbytes, offset).wait()


def test_aligned_transfers_never_enter_it(direct_file, memory, tmp_path):
    engine, file, content = direct_file
    transfer_both_ways(engine, file, content, memory, ALIGNED)
    stats = engine.stats()
    assert stats["chunks_buffered"] == stats["chunks_bounced"] == 0
    assert cached_bytes(tmp_path / "data") == 0
    assert (tmp_path / "data").read_bytes() == content


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_unaligned_transfers_leave_nothing_in_it(direct_file, memory, tmp_path, case):
    engine, file, content = direct_file
    transfer_both_ways(engine, file, content, memory, case)
    assert cached_bytes(tmp_path / "data") == 0
    assert engine.stats()["chunks_buffered"] <= 4, "only what is less than a block, twice in each direction"
    assert (tmp_path / "data").read_bytes() == content


def test_many_parts_of_blocks_at_once_leave_nothing_in_it(direct_file, memory, tmp_path):
    """Neighbours share blocks, so one's page may be dirty when the other evicts it; the last one to finish does it."""
    engine, file, content = direct_file
    nbytes, count = 1000, 400
    content[: nbytes * count] = memory.buffer[: nbytes * count] = os.urandom(nbytes * count)
    places = range(0, nbytes * count, nbytes)
    for ticket in [engine.write(file, memory.address + place, nbytes, place) for place in places]:
        ticket.wait()
    assert cached_bytes(tmp_path / "data") <= 16 * PAGE
    assert (tmp_path / "data").read_bytes() == content


def test_a_refused_direct_transfer_leaves_nothing_in_it(make_engine, memory, tmp_path):
    """It goes through the page cache as a whole."""
    engine = make_engine(backend="pool", fault_script=f"nth=2 errno={errno.EINVAL}; nth=11 errno={errno.EINVAL}")
    file = engine.open_file(tmp_path / "data", create=True)
    if not file.direct:
        pytest.skip(f"no direct I/O on {tmp_path}")
    file.grow(FILE_BYTES)
    data = memory.buffer[1 : 1 + FILE_BYTES] = os.urandom(FILE_BYTES)
    for _ in range(2):  # each of 8 pieces, one of which is sent twice
        engine.write(file, memory.address + 1, FILE_BYTES, 0).wait()
    assert engine.stats()["direct_refused"] == engine.stats()["chunks_buffered"] == 2
    assert cached_bytes(tmp_path / "data") == 0
    assert (tmp_path / "data").read_bytes() == data


def test_bounce_buffers_are_bounded_and_given_back(make_engine, memory, backend, tmp_path):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory.buffer[:] = bytes(memory.nbytes)
    before = resident_bytes()
    engine = make_engine(backend=backend, queue_depth=4, block_bytes=4 * MIB)
    file = engine.open_file(tmp_path / "data", create=True)
    if not file.direct:
        pytest.skip(f"no direct I/O on {tmp_path}")
    file.grow(FILE_BYTES)
    tickets = [engine.write(file, memory.address + 1, FILE_BYTES, 0) for _ in range(8)]
    for ticket in tickets:
        ticket.wait()
    assert engine.stats()["chunks_bounced"] == 8 * FILE_BYTES // MIB
    assert resident_bytes() - before < 4 * MIB + 2 * MIB
    engine.close()
    del tickets[:], ticket
    assert resident_bytes() - before < 2 * MIB
