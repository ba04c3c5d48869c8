"""Disks whose bandwidth is known, disks that are small, and files that may not grow."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deepoffload.io.engine import BACKENDS, IoEngine
from deepoffload.io.probe import Bandwidth, cached_bandwidth, measure_bandwidth, store_bandwidth


def disk_of(folder: Path) -> Bandwidth:
    """What its disk does, measured where that is not known yet."""
    found = cached_bandwidth(folder, BACKENDS[-1])
    if found is None:
        with IoEngine() as engine:
            found = measure_bandwidth(folder, engine)
    return found


def lies_on(disk: Bandwidth, folder: Path) -> list[Path]:
    """Let engines know what the disk of a folder does: to measure it takes each more than a second. All backends are
    about as fast. Returns the files that say so."""
    place = os.path.realpath(folder)
    kept = [store_bandwidth(replace(disk, path=place, backend=backend)) for backend in BACKENDS]
    assert None not in kept, "the cache cannot be written"
    return [path for path in kept if path is not None]


def folder_on_disk(folder: Path) -> Path:
    """Make a folder, on the disk of the one around it."""
    folder.mkdir()
    lies_on(disk_of(folder.parent), folder)
    return folder


@contextmanager
def tmpfs(where: Path, mib: int) -> Iterator[Path]:
    """A file system of so many MiB; the test is skipped where we may not mount one."""
    where.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", where], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond this, with EFBIG (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
