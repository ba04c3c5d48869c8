"""What Linux says about a process and about the rest of the machine. All counters only grow."""

from __future__ import annotations

import os
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SECTOR_BYTES = 512
SAMPLE_INTERVAL_S = 0.01
FACTOR_BYTES = 1024  # of the sizes in /proc/PID/status


@dataclass(frozen=True)
class Reading:
    """Bytes this process moved to and from disks, CPU seconds it used, CPU seconds the whole machine was busy (time
    stolen by the hypervisor counts), bytes that all disks moved."""

    read_bytes: int
    written_bytes: int
    own_cpu_s: float
    busy_cpu_s: float
    all_disk_bytes: int

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


def read_counters() -> Reading:
    """Of /proc/self/io, /proc/stat and /proc/diskstats (proc(5))."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    cpu = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    times = os.times()
    return Reading(
        read_bytes=int(io["read_bytes"]),
        written_bytes=int(io["write_bytes"]),
        own_cpu_s=times.user + times.system,
        busy_cpu_s=(sum(cpu) - cpu[3] - cpu[4]) * TICK_S,  # all but idle and waiting for I/O
        all_disk_bytes=_all_disk_bytes(),
    )


def _all_disk_bytes() -> int:
    total = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (Path("/sys/block") / fields[2] / "device").exists():  # a disk, neither a part of one nor made of others
            total += (int(fields[5]) + int(fields[9])) * SECTOR_BYTES
    return total


def memory_bytes(pid: int | str) -> int:
    """RssAnon + RssShmem of a process, "self" for this one; 0 when it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * FACTOR_BYTES for name in ("RssAnon", "RssShmem") if name in fields)


class MemoryWatch:
    """Looks at another process's memory a hundred times a second, from outside so that it costs that one nothing."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, memory_bytes(self._pid))

    def take_peak(self) -> int:
        """The most since the last call, in bytes."""
        peak, self._peak_bytes = max(self._peak_bytes, memory_bytes(self._pid)), 0
        return peak

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
