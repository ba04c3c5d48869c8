"""What the disk gives to the best tool: reads and writes at once, in the same round as the training steps."""

from __future__ import annotations

import importlib
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.job import Effort, Job
from deepoffload.cli.nvme.types import Pattern, Setting
from deepoffload.io.engine import BACKENDS, probe_backend

MIB = 1 << 20
MEMORY_BYTES = 128 * MIB
CELLS = ((MIB, 16), (4 * MIB, 16))
"""Block size in bytes and blocks in flight: the best two of benchmarks/io."""
EFFORT = Effort(0.1, 0.5)


class DiskRate:
    """Files and memory for the tools of ``benchmarks/io``; a context manager.

    Args:
        file_bytes: of each of two test files, a multiple of 128 MiB.
    """

    def __init__(self, path: str, *, fio: bool, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._path = Path(path)
        self._fio = fio and shutil.which("fio") is not None
        self._stack = ExitStack()

    def __enter__(self) -> DiskRate:
        tools: Any = importlib.import_module("benchmarks.io.contenders")
        with ExitStack() as stack:
            self._move = tools.move
            memory = tools.huge_memory(stack, MEMORY_BYTES)
            shared, checked = (stack.enter_context(BenchFile(self._path, n, self._file_bytes)) for n in (0, 1))
            for file in (shared, checked):
                with Job(Setting("pool", MIB, 16, True, 1), [[file]], [memory], threading.Event()) as job:
                    job.fill(time.monotonic() + 600)
            backends = [name for name in BACKENDS if name != "pool" and probe_backend(name).available]
            self._contenders = [tools.Ours(name, shared, checked, memory) for name in backends]
            self._contenders += [tools.Fio(name, shared) for name in backends] if self._fio else []
            self._contenders += [] if self._contenders else [tools.Ours("pool", shared, checked, memory)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, pattern: Pattern = Pattern.MIXED) -> dict[str, float]:
        """Bytes per second of each tool, its better block size of this moment."""
        return {
            tool.name: max(self._move(tool, pattern, block, depth, EFFORT).bytes_per_s for block, depth in CELLS)
            for tool in self._contenders
        }
