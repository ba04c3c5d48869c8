"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from deepoffload import __version__
from deepoffload.machine import mount_of, usable_cores

QUEUE_FILES = ("scheduler", "max_sectors_kb", "max_segments", "nr_requests", "rotational", "logical_block_size")


def describe_machine(directories: list[str]) -> dict[str, Any]:
    """Processor, memory, kernel, limits, and for each directory its file system and device. Plain JSON values."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "deepoffload": __version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memlock_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "transparent_huge_pages": _line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_average": list(os.getloadavg()),
        "command": " ".join(sys.argv),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "paths": [describe_path(directory) for directory in directories],
    }


def describe_path(directory: str) -> dict[str, Any]:
    """File system, mount options and block device of a directory."""
    kind, options = mount_of(directory)
    status = os.statvfs(directory)
    device = os.stat(directory).st_dev
    found: dict[str, Any] = {
        "path": directory,
        "file_system": kind,
        "mount_options": options,
        "total_bytes": status.f_blocks * status.f_frsize,
        "free_bytes": status.f_bavail * status.f_frsize,
    }
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if block.exists():
        real = block.resolve()
        disk = real if (real / "queue").is_dir() else real.parent
        found["device"] = disk.name
        found["model"] = _line(disk / "device/model") or _line(disk / "device/serial")
        found["queue"] = {name: _line(disk / "queue" / name) for name in QUEUE_FILES}
    return found


def _processor() -> str:
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return None if text is None else text.strip()
