"""Errors of a real block device: a small ext4 on a loop device that fills up, and whose backing file then shrinks."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.io.swap_space import SwapSpace

MIB = 1 << 20
IMAGE_BYTES = 128 * MIB


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return tmp_path / "image"


@pytest.fixture
def sector_bytes() -> int:
    return 512


@pytest.fixture
def small_ext4(tmp_path: Path, image: Path, sector_bytes: int) -> Iterator[Path]:
    image.touch()
    os.truncate(image, IMAGE_BYTES)
    where = tmp_path / "mounted"
    where.mkdir()
    try:
        found = subprocess.run(
            ["losetup", "-f", "--show", "-b", str(sector_bytes), image], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no loop device for us")
    device = found.stdout.strip()
    try:
        for command in (["mkfs.ext4", "-q", device], ["mount", device, where]):
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"{command[0]} is not possible here")
        yield where
    finally:
        subprocess.run(["umount", "-l", where], capture_output=True)
        subprocess.run(["losetup", "-d", device], capture_output=True)


def test_a_device_that_fails_reads(make_engine, memory, backend, small_ext4, image):
    writer = make_engine(backend=backend)
    file = writer.open_file(small_ext4 / "data", create=True)
    assert file.direct
    file.grow(16 * MIB)
    writer.write(file, memory.address, 16 * MIB, 0).wait(100)
    file.sync()
    os.truncate(image, 8 * MIB)  # the disk ends in the middle
    engine = make_engine(backend=backend)
    damaged = engine.open_file(small_ext4 / "data")
    with pytest.raises(IoFailure, match="device or file system reports an error") as caught:
        engine.read(damaged, memory.address, 16 * MIB, 0).wait(100)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(small_ext4 / "data")
    os.truncate(image, IMAGE_BYTES)
    engine.read(damaged, memory.address, 16 * MIB, 0).wait()


def test_a_full_disk_under_a_file_that_was_not_allocated(make_engine, memory, backend, small_ext4):
    engine = make_engine(backend=backend)
    file = engine.open_file(small_ext4 / "data", create=True)
    tickets = [engine.write(file, memory.address, 16 * MIB, number * 16 * MIB) for number in range(10)]
    errors = []
    for ticket in tickets:
        try:
            ticket.wait(60)
        except IoFailure as failure:
            errors.append(failure)
    assert errors and {failure.errno for failure in errors} == {errno.ENOSPC}
    assert all(failure.filename == file.path and failure.offset is not None for failure in errors)
    os.truncate(small_ext4 / "data", MIB)
    engine.write(file, memory.address, MIB, 0).wait()


def test_swap_space_checks_before_it_writes(make_engine, memory, backend, small_ext4):
    with SwapSpace(make_engine(backend=backend), [small_ext4]) as swap:
        with pytest.raises(BudgetError, match=f"{small_ext4}.*host_budget"):
            swap.reserve(64 * MIB)
        assert swap.capacity_bytes == 0
        extent = swap.allocate(4 * MIB)
        (small_ext4 / "filler").touch()
        with pytest.raises(OSError), open(small_ext4 / "filler", "wb") as filler:
            while True:
                filler.write(bytes(MIB))
                filler.flush()
        memory.buffer[:4] = b"here"
        swap.write(extent, memory.address).wait(100)  # its blocks are its own, however full the disk is
        memory.buffer[:4] = bytes(4)
        swap.read(extent, memory.address).wait(100)
        assert bytes(memory.buffer[:4]) == b"here"
        with pytest.raises(BudgetError, match=str(small_ext4)):
            swap.allocate(8 * MIB)


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_alignment_is_asked_of_the_file(make_engine, memory, backend, small_ext4, sector_bytes):
    """Memory shifted by 512 bytes suits one device and not the other; the bytes are right on both."""
    engine = make_engine(backend=backend)
    file = engine.open_file(small_ext4 / "data", create=True)
    assert (file.direct, file.offset_align) == (True, sector_bytes)
    file.grow(8 * MIB)
    data = memory.buffer[512 : 512 + 4 * MIB] = os.urandom(4 * MIB)
    engine.write(file, memory.address + 512, 4 * MIB, MIB).wait(100)
    assert (engine.stats()["chunks_bounced"] > 0) == (sector_bytes > 512)
    assert engine.stats()["chunks_buffered"] == engine.stats()["direct_refused"] == 0
    memory.buffer[: 8 * MIB] = bytes(8 * MIB)
    engine.read(file, memory.address + 512, 4 * MIB, MIB).wait(100)
    assert memory.buffer[512 : 512 + 4 * MIB] == data
    with open(file.path, "rb") as plain:
        assert plain.read()[MIB : 5 * MIB] == data
