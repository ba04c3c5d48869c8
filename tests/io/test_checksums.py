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


def test_without_verify_nobody_looks(make_engine, memory, tmp_path):
    engine = make_engine(fault_script="op=read nth=1 flip=9")
    with SwapSpace(engine, [tmp_path]) as swap:
        extent = swap.allocate(MIB)
        data = memory.buffer[:MIB] = os.urandom(MIB)
        swap.write(extent, memory.address).wait()
        swap.read(extent, memory.address).wait()
        assert memory.buffer[:MIB] != data


def test_partial_reads_are_verified_as_far_as_they_can_be(make_engine, memory, tmp_path):
    with SwapSpace(make_engine(), [tmp_path], verify=True) as swap:
        extent = swap.allocate(3 * MIB)
        memory.buffer[: 3 * MIB] = os.urandom(3 * MIB)
        swap.read(extent, memory.address).wait()  # never written: nothing to compare with
        swap.write(extent, memory.address, nbytes=700_000).wait()
        for nbytes in (1, 100_000, 262_144, 699_999, 700_000, 3 * MIB):
            swap.read(extent, memory.address, nbytes=nbytes).wait()


def flip_on_disk(directory, offset: int) -> None:
    """In the swap file there, which has no name, only descriptors of this process."""
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.realpath(link).startswith(f"{directory}/deepoffload-"):
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
