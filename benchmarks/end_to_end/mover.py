"""Moves bytes to and from a disk next to a program that computes: as many as a training step moves, evenly spread.

It says what the machine itself takes for such traffic. Cores, memory and the hypervisor serve the disk, too, so the
same computing is slower next to it, for each program. A process of its own does only what no engine can leave
out: requests of 4 MiB on huge pages past the page cache, reads and writes in turns, which nobody looks at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.disk import CELLS
from benchmarks.io.contenders import huge_memory
from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.job import Job
from deepoffload.cli.nvme.types import Setting
from deepoffload.io.engine import BACKENDS, IoEngine, probe_backend
from deepoffload.io.ticket import Ticket

FILE_BYTES = 512 << 20
REQUEST_BYTES = 4 << 20
IN_FLIGHT = 16
LATE_S = 0.25
"""What could not be moved for so long is left out: the disk gives no more."""
IDLE_S = 0.002


class Mover:
    """The process, and how fast it moves. It stands still until it is told a rate, and ends with this process, whose
    pipe it reads."""

    def __init__(self, path: str) -> None:
        command = [sys.executable, "-m", "benchmarks.end_to_end.mover", path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # its files are filled

    def move(self, bytes_per_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{bytes_per_s}\n")
        self._process.stdin.flush()

    def moved_bytes(self) -> tuple[int, int]:
        """Read and written since it began."""
        lines = Path(f"/proc/{self._process.pid}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return int(found["read_bytes"]), int(found["write_bytes"])

    def cpu_s(self) -> float:
        """Processor time of the process since it began."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Beside:
    """Has the bytes of a step moved while it computes, evenly over the time that the step before took."""

    def __init__(self, path: str, step_bytes: float) -> None:
        self._mover, self._step_bytes = Mover(path), step_bytes

    def step(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What :func:`child.one_step` returns, with the bytes that were moved, and without the mover's load."""
        before, used_s = self._mover.moved_bytes(), self._mover.cpu_s()
        step = make()
        read, written = (now - then for now, then in zip(self._mover.moved_bytes(), before, strict=True))
        share = (self._mover.cpu_s() - used_s) / step["seconds"] / (os.cpu_count() or 1)
        self._mover.move(self._step_bytes / step["seconds"])
        return step | {
            "read_bytes": read,
            "written_bytes": written,
            "foreign_cpu_share": max(0.0, step["foreign_cpu_share"] - share),
            "foreign_disk_bytes": max(0, step["foreign_disk_bytes"] - read - written),
        }


class _Loop:
    """What the process does."""

    def __init__(self, engine: IoEngine, file: BenchFile, address: int) -> None:
        self._engine, self._address = engine, address
        self._handle = engine.open_file(file.proc_path, direct="required")
        self._half = file.size_bytes // 2
        self._in_flight: deque[Ticket] = deque()
        self._count = 0
        self.rate = 0.0

    def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            now_s, rate = time.perf_counter(), self.rate
            if not rate or due_s > now_s:
                due_s = due_s if rate else now_s
                time.sleep(IDLE_S)
                continue
            self._one()
            due_s = max(due_s, now_s - LATE_S) + REQUEST_BYTES / rate

    def _one(self) -> None:
        if len(self._in_flight) == IN_FLIGHT:
            self._in_flight.popleft().wait()
        number, writes = divmod(self._count, 2)
        offset = number * REQUEST_BYTES % self._half + writes * self._half
        address = self._address + self._count % IN_FLIGHT * REQUEST_BYTES
        start = self._engine.write if writes else self._engine.read
        self._in_flight.append(start(self._handle, address, REQUEST_BYTES, offset))
        self._count += 1


def main() -> None:
    path = sys.argv[1]
    backend = next(name for name in BACKENDS if probe_backend(name).available)
    block_bytes, depth = CELLS[0]
    with ExitStack() as stack:
        memory = huge_memory(stack, IN_FLIGHT * REQUEST_BYTES)
        file = stack.enter_context(BenchFile(path, 0, FILE_BYTES))
        with Job(Setting("pool", block_bytes, depth, True, 1), [[file]], [memory], threading.Event()) as job:
            job.fill(time.monotonic() + 600)
        engine = IoEngine(backend=backend, queue_depth=depth, block_bytes=block_bytes)
        stack.callback(engine.close)
        loop = _Loop(engine, file, memory.address)
        threading.Thread(target=loop.run, daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            loop.rate = float(line)
        os._exit(0)  # the file has no name, and what is under way may be lost


if __name__ == "__main__":
    main()
