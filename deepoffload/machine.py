"""What this process may use of the machine: memory, cores and disk.

``Machine`` is a value: a function that decides by it takes it as an argument, and only :func:`measure` looks. A
container's limits count, not the host's: cgroup v2 (https://docs.kernel.org/admin-guide/cgroup-v2.html, "Memory" and
"CPU") and v1 (https://docs.kernel.org/admin-guide/cgroup-v1/memory.html).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deepoffload.errors import IoFailure

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a limit near 2**63 where there is none."""

FREED_BYTES_MAX = 64 << 20
"""So much freed memory may stay. A process that has grown by less gives nothing back, which is always so with small
models. With large ones giving back takes little time, compared with filling so much."""


def return_free_memory() -> None:
    """Have the C library give memory that was freed back to the system, where it can (glibc's ``malloc_trim(3)``).

    glibc keeps what was freed below something that is still in use. After a model was built tensor by tensor that is
    as much as the largest of them, several times over.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Memory of this process, in bytes: /proc/self/statm, https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class FreedMemory:
    """Gives freed memory back while something that lives long is made between what lives for a moment.

    glibc keeps what was freed below something that is still in use. What micro-batches that take turns, or activations
    that leave, let go of lies between tensors that live on. A hole of the size of the next request is too small for it
    once its alignment is added. So nearly everything that was ever freed would stay.

    What counts is how much the process has grown, since it costs little to ask for. Tensors that stay make it grow,
    too: they cause one attempt for each ``FREED_BYTES_MAX``. It is for programs that keep little. Where they keep their
    activations nearly all growth is theirs, and what is given back is soon used again: the system clears it first.
    """

    def __init__(self) -> None:
        self._settled_bytes = resident_bytes()

    def look(self) -> None:
        """Something has just been let go of: give back what it pays to give back."""
        now_bytes = resident_bytes()
        if now_bytes > self._settled_bytes + FREED_BYTES_MAX:
            return_free_memory()
            self._settled_bytes = resident_bytes()
        else:
            self._settled_bytes = min(self._settled_bytes, now_bytes)


@dataclass(frozen=True)
class DiskSpace:
    """Free bytes of the file system that holds ``path``; paths with the same ``filesystem_id`` share them."""

    path: str
    free_bytes: int
    filesystem_id: int


@dataclass(frozen=True)
class Machine:
    """Measured limits. Memory and disk in bytes, ``cores`` in whole cores that may run at once."""

    memory_total_bytes: int
    """The smaller of the machine's memory and the container's limit."""
    memory_available_bytes: int
    """What can be taken now without swapping or being killed."""
    cores: int
    disks: tuple[DiskSpace, ...] = ()
    physical_bytes: int | None = None
    """What the machine has or may come to have (:func:`physical_bytes`); None: not measured, so what it has now."""
    container_bytes: int | None = None
    """The least limit of the process's control groups; None where there is none."""

    def most_bytes(self, *, may_grow: bool) -> int | None:
        """Memory that this process may come to have at most; None where nothing tells. ``may_grow``: the machine gets
        more than the system knows of, so only the container's limit counts."""
        if may_grow:
            return self.container_bytes
        physical_bytes = self.memory_total_bytes if self.physical_bytes is None else self.physical_bytes
        return physical_bytes if self.container_bytes is None else min(physical_bytes, self.container_bytes)


@dataclass(frozen=True)
class MemoryLimit:
    """A control group's memory limit, and how much of it is still free (caches counted as free)."""

    limit_bytes: int
    free_bytes: int


def measure(paths: Iterable[str] = (), root: str = "/") -> Machine:
    """Look at the machine now.

    Args:
        paths: directories that are to hold swap files, checked already.
        root: where ``proc`` and ``sys`` are found.
    """
    import psutil  # costs 15 ms and is needed only here

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    physical = physical_bytes(Path(root), total)
    limits = memory_limits(Path(root))
    for limit in limits:
        total = min(total, limit.limit_bytes)
        available = min(available, limit.free_bytes)
    return Machine(
        total,
        max(0, available),
        usable_cores(Path(root)),
        tuple(disk_space(path) for path in paths),
        physical,
        min((limit.limit_bytes for limit in limits), default=None),
    )


def physical_bytes(root: Path, total_bytes: int) -> int:
    """Memory that the machine may come to have, as far as the kernel knows: what it has now, blocks that are plugged in
    and not in use yet (https://docs.kernel.org/admin-guide/mm/memory-hotplug.html), and what the host has taken back
    for a while (a balloon: pages that are present in a zone and not managed, proc_zoneinfo(5))."""
    folder = root / "sys/devices/system/memory"
    block_bytes = int(_text(folder / "block_size_bytes") or "0", 16)
    plugged_bytes = block_bytes * sum(1 for path in folder.glob("memory[0-9]*"))
    lines = (line.split() for line in (_text(root / "proc/zoneinfo") or "").splitlines())
    pages = sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "present")
    return max(total_bytes, plugged_bytes, pages * mmap.PAGESIZE)


def disk_space(path: str) -> DiskSpace:
    """Free bytes for an ordinary user in a directory.

    Raises:
        IoFailure: there is none (``io.swap_files`` checks what users name), or its disk fails.
    """
    try:
        return DiskSpace(path, shutil.disk_usage(path).free, os.stat(path).st_dev)
    except OSError as error:
        raise IoFailure("asking for free space", error.errno or 0, path, 0, 0) from error


def mount_of(path: str) -> tuple[str, str]:
    """Type and options of the mount that holds ``path``: the longest mount point above it, the last of equals."""
    best, kind, options = "", "unknown", ""
    path = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind, options
    for line in lines:
        _, point, point_kind, point_options, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind, options = point, point_kind, point_options
    return kind, options


def in_memory(directory: str) -> bool:
    """Whether files there are memory and no disk is involved."""
    return mount_of(directory)[0] in MEMORY_FILE_SYSTEMS


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the process's affinity mask, or fewer where a control group's quota allows fewer. At least 1."""
    cores = len(os.sched_getaffinity(0))
    for quota_us, period_us in _cpu_quotas(root):
        cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of this process's memory control group and of its ancestors; empty where there is none."""
    limits = []
    for group in _groups(root, "memory", "sys/fs/cgroup"):
        limit = _limit_of(group, "memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))
        if limit is not None:
            limits.append(limit)
    for group in _groups(root, "memory", "sys/fs/cgroup/memory", v1=True):
        limit = _limit_of(group, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))
        if limit is not None:
            limits.append(limit)
    return limits


def _limit_of(group: Path, limit_file: str, usage_file: str, reclaimable: tuple[str, ...]) -> MemoryLimit | None:
    limit, usage = _integer(group / limit_file), _integer(group / usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    pairs = (line.split() for line in (_text(group / "memory.stat") or "").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    cache = sum(stat.get(name, 0) for name in reclaimable)
    return MemoryLimit(limit, max(0, limit - max(0, usage - cache)))


def _cpu_quotas(root: Path) -> Iterator[tuple[int, int]]:
    for group in _groups(root, "cpu", "sys/fs/cgroup"):
        words = (_text(group / "cpu.max") or "").split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]) > 0:
            yield int(words[0]), int(words[1])
    for group in _groups(root, "cpu", "sys/fs/cgroup/cpu", v1=True):
        quota, period = _integer(group / "cpu.cfs_quota_us"), _integer(group / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            yield quota, period


def _groups(root: Path, controller: str, mount: str, v1: bool = False) -> Iterator[Path]:
    """Directories of the process's control group and its ancestors, the mount itself last.

    Inside a container the path in ``/proc/self/cgroup`` may be the host's and not exist; then only the mount is left.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (controller in controllers.split(",")) if v1 else (number == "0" and not controllers):
            base = root / mount
            group = base / path.lstrip("/")
            while group != base and base in group.parents:
                if ".." not in group.parts and group.is_dir():
                    yield group
                group = group.parent
            yield base


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _integer(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.removeprefix("-").isdecimal() else None
