"""How several ranks save and load a whole training state: `python -m benchmarks.ranks saving --path DIR`.

Each rank has one thread, and everything lies on NVMe. All ranks save to one directory and load from it. Rates are bytes
of the checkpoint per second, next to what the disk does in the same run. Memory is RssAnon and RssShmem of all ranks
together, each watched from outside: while they train, while they save and while they load. ("of_disk": bytes that are
read and written, as a share of what the disk does of both at once.)
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.common.launch import start_ranks
from benchmarks.end_to_end.meter import MemoryWatch

LIMIT_S = 900.0
MOVES = 2
"""A save reads each byte from the swap file and writes it to the checkpoint, a load the other way round."""
ALLOWED_BYTES = 64 << 20
"""What a save and a load may take in addition to training, of each rank."""


def measure(*, ranks: int, size: str, rounds: int, host_budget: str, path: str) -> dict[str, Any]:
    """Train, and then save and load ``rounds`` times."""
    spec = {"size": size, "rounds": rounds, "host_budget": host_budget, "path": path}
    command = [sys.executable, "-m", "benchmarks.ranks.saver", json.dumps(spec)]
    with ExitStack() as stack:
        processes = start_ranks(command, ranks, 1)
        for process in processes:
            stack.callback(process.kill)
        watches = [stack.enter_context(MemoryWatch(process.pid)) for process in processes]
        told = [_told(processes[0].stdout, watches)]
        for process in processes[1:]:
            assert process.stdout is not None
            told.append([json.loads(line) for line in process.stdout])
        ended = [process.wait(timeout=LIMIT_S) for process in processes]
    if any(ended):
        raise SystemExit(f"ranks have failed: {ended}")
    first = told[0]
    train_bytes = max(line["peak_bytes"] for line in first if line["phase"] == "train")
    found: dict[str, Any] = {"train": {"peak_bytes": train_bytes}}
    for phase in ("save", "load"):
        lines = [line for line in first if line["phase"] == phase]
        seconds = statistics.median(line["seconds"] for line in lines)
        peak_bytes = max(line["peak_bytes"] for line in lines)
        found[phase] = {
            "seconds": seconds,
            "bytes_per_s": lines[0]["nbytes"] / seconds,
            "of_disk": MOVES * lines[0]["nbytes"] / seconds / lines[0]["disk_bytes_per_s"],
            "peak_bytes": peak_bytes,
            "more_than_training_bytes": peak_bytes - train_bytes,
        }
    allowed = ALLOWED_BYTES * ranks
    return {
        "question": "How fast do several ranks save and load a training state, and how much memory do they take?",
        "work": {"size": size, "ranks": ranks, "threads_per_rank": 1, "host_budget": host_budget, "rounds": rounds},
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__},
        "found": found,
        "within_allowance": all(found[phase]["more_than_training_bytes"] <= allowed for phase in ("save", "load")),
        "lines": first,
    }


def _told(lines: Any, watches: Sequence[MemoryWatch]) -> list[dict[str, Any]]:
    """What rank 0 prints at the end of each phase, with the peak of all ranks in it."""
    found = []
    for line in lines:
        peak_bytes = sum(watch.take_peak() for watch in watches)
        found.append({**json.loads(line), "peak_bytes": peak_bytes})
        print(f"{found[-1]}", file=sys.stderr, flush=True)
    return found
