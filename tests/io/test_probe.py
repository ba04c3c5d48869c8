"""Probing and measuring real paths."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import replace

import pytest

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.io.engine import choose_backend, probe_backend
from deepoffload.io.kept_measurements import cache_directory
from deepoffload.io.probe import (
    Bandwidth,
    cached_bandwidth,
    measure_bandwidth,
    probe_path,
    store_bandwidth,
    stripe_weights,
)
from deepoffload.io.swap_space import SwapSpace


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepoffload"


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_the_report_says_what_a_file_there_can_do(make_engine, disk):
    engine = make_engine()
    report = probe_path(disk, engine)
    assert report.path == str(disk) and report.free_bytes > 0
    file = engine.open_file(disk / "x", create=True)
    assert (report.direct, report.memory_align, report.offset_align) == (
        file.direct,
        file.memory_align,
        file.offset_align,
    )
    assert "O_DIRECT works" in report.direct_reason or not report.direct
    assert [path.name for path in disk.iterdir()] == ["x"]


def test_a_measurement_is_kept_and_leaves_nothing(make_engine, disk, cache):
    engine = make_engine()
    first = measure_bandwidth(disk, engine, time_s=0.4)
    assert list(disk.iterdir()) == []
    assert min(first.read_bytes_per_s, first.write_bytes_per_s, first.mixed_bytes_per_s) > 1e6
    assert 0 <= first.overlap <= 1
    assert cache_directory() == cache
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    moved = engine.stats()["bytes_read"]
    assert measure_bandwidth(disk, engine, time_s=0.4) == first
    assert engine.stats()["bytes_read"] == moved, "the second answer comes from the cache"
    assert measure_bandwidth(disk, engine, time_s=0.1, use_cache=False) != first


def test_what_cannot_be_ours_is_ignored_with_a_note(make_engine, disk, cache, tmp_path, caplog):
    given = Bandwidth(str(disk), "pool", True, 1e9, 2e9, 1.5e9, time.time())
    file = store_bandwidth(given)
    good = file.read_text()

    def with_value(name: str, value: str) -> str:
        return json.dumps({**json.loads(good), name: "VALUE"}).replace('"VALUE"', value)

    texts = ["", "{", "[]", "null", '{"path": 1}', "[" * 30_000, '{"a":' * 10_000, good[:-3], " " * (1 << 20) + good]
    for name in ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s", "measured_at_unix_s"):
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "0", "-1", "true", '"9"', "[1]", "null", "9" * 5000):
            texts.append(with_value(name, value))
    texts += [with_value("path", '"/"'), with_value("backend", "1"), with_value("direct", "1"), with_value("more", "1")]
    for text in texts:
        file.write_text(text)
        caplog.clear()
        assert cached_bandwidth(disk, "pool") is None, text[:80]
        assert str(file) in caplog.text and "ignored" in caplog.text, text[:80]
    file.write_text(good)
    assert cached_bandwidth(disk, "pool") == given

    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(good)

    def link() -> None:
        file.unlink()
        file.symlink_to(elsewhere)

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    for change in (link, pipe, folder, lambda: file.chmod(0o622)):
        change()
        caplog.clear()
        assert cached_bandwidth(disk, "pool") is None
        assert "ignored" in caplog.text
        file.rmdir() if file.is_dir() else file.unlink()
        file.write_text(good)
        file.chmod(0o600)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(file, 12345, -1)
        caplog.clear()
        assert cached_bandwidth(disk, "pool") is None
        assert "belongs to user id 12345" in caplog.text
    file.write_text("{")
    assert measure_bandwidth(disk, make_engine(backend="pool"), time_s=0.05).read_bytes_per_s > 0
    assert cached_bandwidth(disk, "pool") is not None, "and what is measured takes its place"


def test_the_folder_is_nobody_elses(disk, cache, tmp_path):
    given = Bandwidth(str(disk), "pool", True, 1e9, 2e9, 1.5e9, time.time())
    assert store_bandwidth(given) is not None
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.chmod(0o777)
    assert store_bandwidth(given) is not None
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.rename(tmp_path / "moved")
    cache.symlink_to(tmp_path / "moved")
    before = sorted((tmp_path / "moved").iterdir())
    assert store_bandwidth(given) is None and sorted((tmp_path / "moved").iterdir()) == before


def test_an_old_measurement_is_taken_again(make_engine, disk, cache):
    engine = make_engine()
    first = measure_bandwidth(disk, engine, time_s=0.05)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "measured_at_unix_s": time.time() - 100 * 86400}))
    assert measure_bandwidth(disk, engine, time_s=0.05).measured_at_unix_s > first.measured_at_unix_s


def test_files_too_old_to_be_used_are_removed(disk, cache):
    cache.mkdir(parents=True)
    old, recent, other = cache / "bandwidth-old.json", cache / "bandwidth-recent.json", cache / "somebody's.json"
    for file, days in ((old, 31), (recent, 29), (other, 31)):
        file.touch()
        os.utime(file, (time.time() - days * 86400,) * 2)
    kept = store_bandwidth(Bandwidth(str(disk), "pool", True, 1e9, 2e9, 1.5e9, time.time()))
    assert sorted(cache.iterdir()) == sorted([kept, recent, other])


def test_a_cache_that_cannot_be_written_is_no_error(make_engine, disk, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    measured = measure_bandwidth(disk, make_engine(), time_s=0.05)
    assert measured.read_bytes_per_s > 0
    assert store_bandwidth(measured) is None
    assert cached_bandwidth(disk, measured.backend) is None


def test_what_is_stored_is_found_by_path_and_backend(make_engine, disk, cache, tmp_path):
    given = Bandwidth(str(disk), "pool", True, 1e9, 2e9, 1.5e9, time.time())
    assert cached_bandwidth(disk, "pool") is None
    assert store_bandwidth(given) == next(cache.iterdir())
    assert cached_bandwidth(disk, "pool") == given == measure_bandwidth(disk, make_engine(backend="pool"))
    assert cached_bandwidth(disk, "libaio") is None
    (tmp_path / "other").mkdir()
    assert cached_bandwidth(tmp_path / "other", "pool") is None
    with pytest.raises(ConfigError, match="does not exist"):
        cached_bandwidth(disk / "none", "pool")
    with pytest.raises(ConfigError, match="does not exist"):
        store_bandwidth(replace(given, path=str(disk / "none")))


@pytest.mark.parametrize(
    ("read", "write", "mixed", "overlap"),
    [(2e9, 2e9, 2e9, 0.0), (2e9, 2e9, 4e9, 1.0), (2e9, 2e9, 3e9, 0.5), (4e9, 10e9, 5e9, 0.0), (1e9, 1e12, 2e9, 1.0)],
)
def test_overlap_tells_half_from_full_duplex(read, write, mixed, overlap):
    assert Bandwidth("/", "pool", True, read, write, mixed, 0.0).overlap == pytest.approx(overlap, abs=0.02)


def test_a_missing_path(make_engine, tmp_path):
    for call in (probe_path, measure_bandwidth):
        with pytest.raises(ConfigError, match="does not exist"):
            call(tmp_path / "none", make_engine())


def test_backends_are_reported_with_reasons():
    for name in ("libaio", "io_uring", "pool"):
        report = probe_backend(name)
        assert report.name == name and report.reason
    assert probe_backend("pool").available
    name, reason = choose_backend("auto")
    assert probe_backend(name).available and reason
    if not probe_backend("io_uring").available:
        with pytest.raises(UnsupportedError, match="io_uring"):
            choose_backend("io_uring")


def test_stripes_follow_the_measured_rates(make_engine, memory, disk, tmp_path):
    (tmp_path / "slow").mkdir()
    rates = [Bandwidth(str(path), "pool", True, 1e9, 1e9, rate, 0.0) for path, rate in (("a", 3e9), ("b", 1e9))]
    with SwapSpace(make_engine(), [disk, tmp_path / "slow"], weights=stripe_weights(rates)) as swap:
        pieces = swap.allocate(16 << 20).pieces
        assert [(piece.path_index, piece.nbytes >> 20) for piece in pieces] == [(0, 12), (1, 4)]
