"""The engine against a byte array: any order of any reads and writes, on every backend, with and without faults."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepoffload.io.engine import IoEngine, Priority
from deepoffload.native.aio import HostMapping

FILE_BYTES = 256 << 10
BLOCK_BYTES = 16 << 10  # small, so that a request is many chunks

# Faults that a transfer must survive without anybody noticing.
HARMLESS = {
    "none": None,
    "short": "seed=3 short=512 permille=300; seed=4 short=5000 permille=200",
    "one byte": "op=read short=1 every=5; op=write short=4097 every=4",
    "interrupted": f"errno={errno.EINTR} every=3; errno={errno.EAGAIN} permille=50",
    "reordered": "seed=9 jitter_us=2000",
    "refused": "refuse=1 every=4; short=1024 every=5",
}

positions = st.one_of(st.integers(0, FILE_BYTES), st.integers(0, FILE_BYTES // 4096).map(lambda page: page * 4096))
operations = st.lists(
    st.tuples(
        st.sampled_from(["read", "write"]),
        positions,  # offset
        positions,  # length, cut at the end of the file
        st.sampled_from([0, 0, 512, 1, 4095]),  # misalignment of the memory
        st.booleans(),  # urgent
    ),
    min_size=1,
    max_size=12,
)


def run_against_model(engine: IoEngine, direct: str, steps: list[tuple[str, int, int, int, bool]]) -> None:
    with HostMapping(FILE_BYTES * 2) as memory, tempfile.TemporaryDirectory() as directory:
        file = engine.open_file(os.path.join(directory, "data"), create=True, unlink=True, direct=direct)
        file.grow(FILE_BYTES)
        model = bytearray(FILE_BYTES)
        if file.direct:
            model[:] = bytes(FILE_BYTES)
        for number, (kind, offset, length, shift, urgent) in enumerate(steps):
            length = min(length, FILE_BYTES - offset)
            address, priority = memory.address + shift, Priority.URGENT if urgent else Priority.NORMAL
            if kind == "write":
                data = os.urandom(length)
                memory.buffer[shift : shift + length] = data
                ticket = engine.write(file, address, length, offset, priority=priority)
                model[offset : offset + length] = data
                ticket.wait()
            else:
                memory.buffer[shift : shift + length] = bytes([number + 1]) * length
                engine.read(file, address, length, offset, priority=priority).wait()
                assert memory.buffer[shift : shift + length] == model[offset : offset + length]
        engine.read(file, memory.address, FILE_BYTES, 0).wait()
        assert memory.buffer[:FILE_BYTES] == model
        file.close()


@pytest.mark.parametrize("direct", ["preferred", "off"])
@pytest.mark.parametrize("faults", HARMLESS, ids=str)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_one_after_the_other(backend, direct, faults, steps):
    with IoEngine(backend=backend, queue_depth=4, block_bytes=BLOCK_BYTES, fault_script=HARMLESS[faults]) as engine:
        run_against_model(engine, direct, steps)


@pytest.mark.parametrize("faults", HARMLESS, ids=str)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=24),
    rounds=st.integers(1, 3),
    depth=st.integers(1, 8),
    page_aligned=st.booleans(),
)
def test_many_at_once(backend, faults, sizes, rounds, depth, page_aligned):
    """Writes to separate places in flight together, then reads of every second one next to rewrites of the others."""
    total = sum(-(-size // 4096) * 4096 for size in sizes) if page_aligned else sum(sizes)
    with (
        IoEngine(backend=backend, queue_depth=depth, block_bytes=BLOCK_BYTES, fault_script=HARMLESS[faults]) as engine,
        HostMapping(max(1, total) * 2 + 4096) as memory,
        tempfile.TemporaryDirectory() as directory,
    ):
        file = engine.open_file(os.path.join(directory, "data"), create=True)
        file.grow(max(1, total))
        starts, at = [], 0
        for size in sizes:
            starts.append(at)
            at += -(-size // 4096) * 4096 if page_aligned else size
        back = -(-max(1, total) // 4096) * 4096  # where reads land
        pieces = list(zip(starts, sizes, strict=True))
        for _ in range(rounds):
            data = os.urandom(total)
            memory.buffer[:total] = data
            memory.buffer[back : back + total] = bytes(total)
            writes = [engine.write(file, memory.address + start, size, start) for start, size in pieces]
            for ticket in reversed(writes):
                ticket.wait()
            again = [engine.write(file, memory.address + start, size, start) for start, size in pieces[::2]]
            reads = [engine.read(file, memory.address + back + start, size, start) for start, size in pieces[1::2]]
            for ticket in again + reads:
                ticket.wait()
            for start, size in pieces[1::2]:
                assert memory.buffer[back + start : back + start + size] == data[start : start + size]
        with open(file.path, "rb") as plain:
            on_disk = plain.read()
        for start, size in pieces:
            assert on_disk[start : start + size] == data[start : start + size]
        stats = engine.stats()
        assert stats["requests_pending"] == stats["chunks_in_flight"] == stats["requests_failed"] == 0
        assert stats["chunks_in_flight_max"] <= depth


@pytest.mark.parametrize(("nbytes", "chunks", "buffered"), [(700, 1, 1), (4096, 1, 0), (3 * 4096 + 700, 2, 1)])
def test_no_block_is_written_both_directly_and_through_the_page_cache(backend, tmp_path, nbytes, chunks, buffered):
    """Odd lengths go directly but for their last block.

    Where direct parts ended inside a block (devices allow 512 bytes), the page cache sometimes wrote the block's old
    beginning over them; tests/native/aio_stress.c showed that with io_uring in about one of thirty runs.
    """
    with IoEngine(backend=backend, block_bytes=BLOCK_BYTES) as engine, HostMapping(BLOCK_BYTES) as memory:
        file = engine.open_file(tmp_path / "data", create=True)
        if not file.direct:
            pytest.skip(f"no direct I/O on {tmp_path}")
        file.grow(BLOCK_BYTES)
        engine.write(file, memory.address, nbytes, 0).wait()
        stats = engine.stats()
        assert (stats["chunks_done"], stats["chunks_buffered"]) == (chunks, buffered)
