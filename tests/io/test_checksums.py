"""``aio.verify``: a bit that flipped, on its way or on the disk, is found and its block named."""

from __future__ import annotations

import errno
import os

import pytest

from deepoffload.errors import IoFailure
from deepoffload.io.swap_space import SwapSpace

MIB = 1 << 20


def test_a_flipped_bit_is_found_and_placed(make_engine, memory, tmp_path, backend):
    engine = make_engine(backend=backend, fault_script="op=read nth=4 flip=4001")  # in the fourth MiB read
    with SwapSpace(engine, [tmp_path], verify=True) as swap:
        swap.allocate(8192)
        extent = swap.allocate(6 * MIB)
        memory.buffer[: 6 * MIB] = os.urandom(6 * MIB)
        swap.write(extent, memory.address).wait()
        ticket = swap.read(extent, memory.address)
        with pytest.raises(IoFailure, match="Checksum 0x") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EBADMSG
        assert (caught.value.offset, caught.value.nbytes) == (8192 + 3 * MIB, 256 << 10)
        assert caught.value.filename is not None and caught.value.filename.startswith(str(tmp_path))
        with pytest.raises(IoFailure, match="Checksum"):
            ticket.wait()
        swap.read(extent, memory.address).wait()


@pytest.mark.parametrize("named", [False, True])
def test_without_verify_nobody_looks(make_engine, memory, tmp_path, named):
    """Named files keep checksums for those who resume; the run's own reads do not pay for comparing them."""
    with SwapSpace(make_engine(), [tmp_path], named=named) as swap:
        extent = swap.allocate(MIB)
        data = memory.buffer[:MIB] = os.urandom(MIB)
        swap.write(extent, memory.address).wait()
        flip_on_disk(tmp_path, extent.pieces[0].offset + 9)
        swap.read(extent, memory.address).wait()
        assert memory.buffer[:MIB] != data
        assert bool(swap.sums_of(extent)) is named


def test_partial_reads_are_verified_as_far_as_they_can_be(make_engine, memory, tmp_path):
    with SwapSpace(make_engine(), [tmp_path], verify=True) as swap:
        extent = swap.allocate(3 * MIB)
        memory.buffer[: 3 * MIB] = os.urandom(3 * MIB)
        swap.read(extent, memory.address).wait()  # never written: nothing to compare with
        swap.write(extent, memory.address, nbytes=700_000).wait()
        for nbytes in (1, 100_000, 262_144, 699_999, 700_000, 3 * MIB):
            swap.read(extent, memory.address, nbytes=nbytes).wait()


def flip_on_disk(directory, offset: int) -> None:
    """In the swap file there, which may have no name, only descriptors of this process."""
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.readlink(link).startswith(f"{directory}/"):
            file = os.open(link, os.O_RDWR)
            (byte,) = os.pread(file, 1, offset)
            os.pwrite(file, bytes([byte ^ 4]), offset)
            os.fsync(file)
            os.close(file)
            return
    raise AssertionError(f"no swap file in {directory}")


def test_a_bit_that_flipped_on_the_disk_is_found_on_its_path(make_engine, memory, tmp_path, backend):
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    with SwapSpace(make_engine(backend=backend), directories, verify=True) as swap:
        swap.allocate(4 * MIB)
        extent, other = swap.allocate(8 * MIB), swap.allocate(MIB)
        data = memory.buffer[: 8 * MIB] = os.urandom(8 * MIB)
        swap.write(extent, memory.address).wait()
        swap.write(other, memory.address).wait()
        piece = extent.pieces[-1]
        flip_on_disk(directories[piece.path_index], piece.offset + MIB + 12345)
        with pytest.raises(IoFailure, match="Checksum 0x.*disk, cable or memory") as caught:
            swap.read(extent, memory.address).wait()
        assert caught.value.errno == errno.EBADMSG
        assert os.path.dirname(caught.value.filename) == str(directories[piece.path_index])
        assert (caught.value.offset, caught.value.nbytes) == (piece.offset + MIB, 256 << 10)
        swap.read(other, memory.address).wait()
        flip_on_disk(directories[piece.path_index], piece.offset + MIB + 12345)
        swap.read(extent, memory.address).wait()
        assert memory.buffer[: 8 * MIB] == data


def test_sums_stay_with_the_blocks_that_were_written(make_engine, memory, tmp_path):
    """Chunks of 300 KiB, so blocks of 256 and 44 KiB take turns. Parts are rewritten and read, any block is damaged."""
    data = bytearray(os.urandom(2 * MIB + 5000))
    extent_bytes = len(data)
    with SwapSpace(make_engine(block_bytes=300 << 10), [tmp_path], verify=True) as swap:
        extent = swap.allocate(extent_bytes)
        (piece,) = extent.pieces
        memory.buffer[:extent_bytes] = bytes(data)
        swap.write(extent, memory.address).wait()
        for part in (1, 4096, 300 << 10, (300 << 10) + 1, 700_001, 2 * MIB):
            data[:part] = os.urandom(part)
            memory.buffer[:extent_bytes] = bytes(data)
            swap.write(extent, memory.address, nbytes=part).wait()
            for nbytes in (part, 2 * MIB - 1, extent_bytes):
                swap.read(extent, memory.address, nbytes=nbytes).wait()
                assert memory.buffer[:nbytes] == data[:nbytes]
        swap.write(extent, memory.address).wait()  # a part of a block takes the sum of the whole with it
        for position in (0, 262_143, 262_144, 307_200, extent_bytes - 1):
            start = position // 307_200 * 307_200 + position % 307_200 // 262_144 * 262_144
            flip_on_disk(tmp_path, piece.offset + position)
            with pytest.raises(IoFailure, match="EBADMSG.*Checksum") as caught:
                swap.read(extent, memory.address).wait()
            assert caught.value.offset == piece.offset + start
            assert caught.value.nbytes == min(262_144, 307_200 - start % 307_200, extent_bytes - start)
            flip_on_disk(tmp_path, piece.offset + position)
        swap.read(extent, memory.address).wait()


def test_short_transfers_and_retries_keep_the_sums_right(make_engine, memory, tmp_path, backend):
    script = f"short=5000 every=3; errno={errno.EINTR} every=4; refuse=1 every=5; seed=5 jitter_us=300"
    with SwapSpace(make_engine(backend=backend, fault_script=script), [tmp_path], verify=True) as swap:
        extents = [swap.allocate(3 * MIB + 100) for _ in range(4)]
        for turn in range(5):
            data = os.urandom(3 * MIB + 100)
            memory.buffer[: len(data)] = data
            for ticket in [swap.write(extent, memory.address) for extent in extents]:
                ticket.wait()
            for extent in extents:
                memory.buffer[4 * MIB : 8 * MIB] = bytes([turn]) * (4 * MIB)
                swap.read(extent, memory.address + 4 * MIB).wait()
                assert memory.buffer[4 * MIB : 4 * MIB + len(data)] == data


def test_a_dropped_write_keeps_what_its_sums_need(make_engine, memory, tmp_path):
    engine = make_engine(fault_script="op=write delay_ms=50")
    swap = SwapSpace(engine, [tmp_path], verify=True)
    extent = swap.allocate(8 * MIB)
    swap.write(extent, memory.address)
    swap.free(extent)
    swap.close()
