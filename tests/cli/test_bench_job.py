"""Measurements on a real disk: what is counted, and that wrong data is found."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from deepoffload.cli.nvme.data import PAGE_BYTES, PERIOD_BYTES, Buffer, make_stamps
from deepoffload.cli.nvme.files import BenchFile, check_room, margin_bytes, room_by_path
from deepoffload.cli.nvme.job import Effort
from deepoffload.cli.nvme.types import DataMismatch, Pattern, Result, Sample, Setting
from deepoffload.errors import BudgetError
from deepoffload.io.engine import BACKENDS, probe_backend
from deepoffload.native.aio import HostMapping

MIB = 1 << 20
EFFORT = Effort(0.02, 0.1)


@pytest.fixture(params=BACKENDS)
def backend(request):
    report = probe_backend(request.param)
    if not report.available:
        pytest.skip(f"{report.name}: {report.reason}")
    return request.param


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("files", [1, 3])
def test_each_pattern_moves_what_it_says(make_job, backend, direct, files):
    job, opened = make_job(Setting(backend, MIB, 4, direct, files), extra_bytes=8 * MIB)
    for pattern in Pattern:
        start = time.perf_counter()
        sample = job.measure(pattern, EFFORT)
        passed_s = time.perf_counter() - start
        assert (sample.bytes_read > 0) == (pattern is not Pattern.WRITE)
        assert (sample.bytes_written > 0) == (pattern is not Pattern.READ)
        assert 0 < sample.seconds <= passed_s and 0 <= sample.cpu_s < 10 * passed_s
        if pattern is Pattern.MIXED:
            more_bytes = abs(sample.bytes_read - sample.bytes_written)  # what was in flight at the ends
            assert more_bytes <= max(8 * MIB, 0.2 * (sample.bytes_read + sample.bytes_written))
        if direct:
            assert sample.seconds >= EFFORT.measure_s
    filled = sum(file.filled_bytes for file in opened)
    assert job.verify(1 << 40, time.monotonic() + 60) == filled > 0


def test_small_blocks_and_many_in_flight(make_job, backend):
    job, _ = make_job(Setting(backend, 4096, 64, True, 1))
    assert job.measure(Pattern.MIXED, EFFORT).bytes_per_s > 0
    assert job.verify(1 << 40, time.monotonic() + 60) > 0


@pytest.mark.parametrize("direct", [True, False])
def test_a_page_in_the_wrong_place_is_found_while_measuring(make_job, direct):
    job, (file,) = make_job(Setting("pool", MIB, 4, direct, 1))
    page = os.pread(file.descriptor, PAGE_BYTES, 0)
    os.pwrite(file.descriptor, page, 5 * PAGE_BYTES)
    with pytest.raises(DataMismatch, match=f"offset {5 * PAGE_BYTES} "):
        job.measure(Pattern.READ, Effort(0.0, 2.0))


def test_a_lost_write_is_found(make_job):
    job, (file,) = make_job(Setting("pool", MIB, 4, True, 1))
    before = os.pread(file.descriptor, MIB, 0)
    job.measure(Pattern.WRITE, EFFORT)
    os.pwrite(file.descriptor, before, 0)
    with pytest.raises(DataMismatch, match="offset 0 "):
        job.measure(Pattern.READ, Effort(0.0, 2.0))


def test_one_flipped_bit_is_found_by_the_full_comparison(make_job):
    job, (file,) = make_job(Setting("pool", MIB, 4, True, 1))
    offset = 3 * MIB + 777
    (value,) = os.pread(file.descriptor, 1, offset)
    os.pwrite(file.descriptor, bytes([value ^ 0x10]), offset)
    with pytest.raises(DataMismatch, match=f"offset {offset // PAGE_BYTES * PAGE_BYTES} "):
        job.verify(1 << 40, time.monotonic() + 60)


def test_a_read_that_moves_nothing_cannot_pass():
    with HostMapping(PERIOD_BYTES) as memory:
        buffer = Buffer(memory.buffer, memory.address)
        buffer.paint()
        stamps = make_stamps(1, 0, PERIOD_BYTES // PAGE_BYTES, 1)
        buffer.stamp(stamps)
        buffer.check_all(stamps, "x", 0)
        buffer.poison()
        with pytest.raises(DataMismatch, match=f"{stamps.size} pages"):
            buffer.check_all(stamps, "x", 0)
        del buffer


def test_stamps_differ_by_file_page_and_generation():
    stamps = np.concatenate([make_stamps(file, 0, 100, generation) for file in (0, 1) for generation in (1, 2)])
    assert np.unique(stamps).size == stamps.size


def test_a_file_has_no_name_and_gives_its_space_back(disk):
    with BenchFile(str(disk), 0, 64 * MIB) as file:
        assert os.listdir(disk) == []
        assert os.fstat(file.descriptor).st_blocks * 512 >= 64 * MIB, "allocated before it is written"
        assert os.path.samestat(os.stat(file.proc_path), os.fstat(file.descriptor))
    file.close()
    held = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
            and os.path.lexists(f"/proc/self/fd/{name}")]  # fmt: skip
    assert not [link for link in held if link.startswith(str(disk))]


def test_the_disk_is_not_filled(disk):
    room = room_by_path([str(disk)])[str(disk)]
    assert room < os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with pytest.raises(BudgetError, match="stay free"):
        check_room([str(disk)], room + (4 << 30))
    assert 64 * MIB <= margin_bytes(str(disk)) <= 4 << 30


def test_paths_on_one_file_system_share_its_room(disk):
    (disk / "a").mkdir()
    (disk / "b").mkdir()
    both = room_by_path([str(disk / "a"), str(disk / "b")])
    alone = room_by_path([str(disk / "a")])[str(disk / "a")]
    assert all(room < 0.6 * alone for room in both.values())


def test_medians_and_spread():
    samples = tuple(Sample(int(rate), 0, 1.0, rate / 1e9) for rate in (1e9, 2e9, 4e9))
    result = Result(Setting("pool", MIB, 1, True, 1), Pattern.READ, samples)
    assert result.bytes_per_s == 2e9 and result.spread == 1.5 and result.cpu_s_per_gb == 1.0
