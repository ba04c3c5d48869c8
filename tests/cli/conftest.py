"""A disk, files and memory for ``ds_nvme_bench``; the user's cache directory is never touched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepoffload.cli.nvme.data import Buffer
from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.job import Job, geometry_of, smallest_file_bytes
from deepoffload.cli.nvme.types import Setting
from deepoffload.native.aio import HostMapping


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepoffload"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def make_job(disk: Path) -> Iterator[Callable[..., tuple[Job, list[BenchFile]]]]:
    """A job on its own files, filled; everything is closed at the end."""
    undo: list[Callable[[], None]] = []

    def make(setting: Setting, *, extra_bytes: int = 0) -> tuple[Job, list[BenchFile]]:
        files = [BenchFile(str(disk), i, smallest_file_bytes(setting) + extra_bytes) for i in range(setting.files)]
        undo.extend(file.close for file in files)
        memory = HostMapping(geometry_of(setting).memory_bytes)
        undo.append(memory.close)
        Buffer(memory.buffer, memory.address).paint()
        job = Job(setting, [files], [memory], threading.Event())
        undo.append(job.close)
        job.fill(time.monotonic() + 20)
        return job, files

    yield make
    for close in reversed(undo):
        close()
