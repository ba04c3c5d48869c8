"""Training on several ranks next to DDP, FSDP2 and DeepSpeed: `python -m benchmarks.ranks training --path DIR`.

Every contender runs in processes of its own, one thread each; in each round all take turns. A step is timed between two
barriers. The plain rows are forward and backward alone: what processes take that share nothing, next to one process
with all their data and threads. Reported are medians over the rounds of the ratio between ours and a peer of the same
round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.launch import start_ranks
from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.meter import MemoryWatch

LIMIT_S = 900.0
FILE_BYTES = 1 << 30
"""Of each of two files with which the disk is measured before and after a row that moves bytes to it."""

VERTICAL: dict[str, Any] = {"accumulation_order": "vertical"}
"""All micro-batches go through each unit together; with ``--accumulate``."""
TUNED_NVME: dict[str, Any] = {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}


@dataclass(frozen=True)
class Case:
    """A contender. ``alone``: one process with as many threads and as much data as all ranks together."""

    side: str
    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


def cases(host_budget: str) -> dict[str, Case]:
    """All contenders by name."""
    memory = {"host_budget": "16GiB", "disk": False}
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    on_nvme = {
        "offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True},
        "offload_param": {"device": "nvme"},
    }
    stage_3 = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0}
    return {
        "ours memory": Case("ours", {**memory, "ranks": {"transport": "memory"}}),
        "ours gloo": Case("ours", {**memory, "ranks": {"transport": "group"}}),
        "ours nvme": Case("ours", {"host_budget": host_budget, "disk": True}),
        "ours nvme guessing": Case("ours", {"host_budget": host_budget, "disk": True, "step_overlap": "speculative"}),
        "ours nvme vertical": Case("ours", {"host_budget": host_budget, "disk": True, **VERTICAL}),
        "ours memory vertical": Case("ours", {**memory, **VERTICAL}),
        "ours alone": Case("ours", memory, alone=True),
        "ours alone vertical": Case("ours", {**memory, **VERTICAL}, alone=True),
        "plain side by side": Case("plain"),
        "plain alone": Case("plain", alone=True),
        "ddp": Case("ddp"),
        "fsdp": Case("fsdp"),
        "fsdp offload": Case("fsdp", {"offload": True}),
        "deepspeed 2": Case("deepspeed", {"zero": {"stage": 2, "overlap_comm": True}}),
        "deepspeed 2 offload": Case("deepspeed", {"zero": {"stage": 2, **offloaded}}),
        "deepspeed 3": Case("deepspeed", {"zero": stage_3}),
        "deepspeed 3 offload": Case("deepspeed", {"zero": {**stage_3, **offloaded}}),
        "deepspeed 3 nvme": Case("deepspeed", {"zero": {**stage_3, **on_nvme}, "aio": TUNED_NVME}),
    }


RATIOS = (
    ("ours gloo", "fsdp offload"),
    ("ours gloo", "deepspeed 3 offload"),
    ("ours memory", "fsdp offload"),
    ("ours memory", "fsdp"),
    ("ours memory", "ddp"),
    ("ours memory", "deepspeed 2"),
    ("ours memory", "deepspeed 2 offload"),
    ("ours memory", "deepspeed 3"),
    ("ours memory", "deepspeed 3 offload"),
    ("ours memory", "ours alone"),
    ("plain side by side", "plain alone"),
    ("ours nvme", "deepspeed 3 nvme"),
    ("ours nvme guessing", "deepspeed 3 nvme"),
    ("ours nvme guessing", "ours nvme"),
    ("ours nvme vertical", "ours nvme"),
    ("ours nvme vertical", "deepspeed 3 nvme"),
    ("ours memory vertical", "ours memory"),
    ("ours memory vertical", "ours alone vertical"),
)


@dataclass(frozen=True)
class Work:
    """What every contender trains; see ``python -m benchmarks.ranks --help``."""

    size: str
    accumulate: int
    steps: int
    warmup: int = 2
    batch: int = 1
    seq: int = 128
    lr: float = 1e-4
    clip: float = 1.0


@contextmanager
def shared_memory_removed() -> Iterator[None]:
    """Files of 69 MB that DeepSpeed's ranks leave in shared memory: a few dozen runs fill the machine's memory."""
    place, pattern = Path("/dev/shm"), "deepspeed_allreduce_buffer_*"
    before = set(place.glob(pattern))
    try:
        yield
    finally:
        for left in set(place.glob(pattern)) - before:
            left.unlink(missing_ok=True)


def run(case: Case, work: Work, ranks: int, path: str, deepspeed_python: str | None) -> dict[str, Any]:
    """One run of a contender: medians of its steps, and the peak of its processes' memory together."""
    count, threads = (1, ranks) if case.alone else (ranks, 1)
    spec = {
        "side": case.side,
        "settings": case.settings,
        "work": work.__dict__,
        "path": path,
        "threads": threads,
        "batch_factor": ranks if case.alone else 1,
    }
    python = deepspeed_python if case.side == "deepspeed" and deepspeed_python else sys.executable
    command = [python, "-m", "benchmarks.ranks.trainer", json.dumps(spec)]
    with shared_memory_removed(), ExitStack() as stack:
        processes = start_ranks(command, count, threads)
        for process in processes:
            stack.callback(process.kill)
        watches = [stack.enter_context(MemoryWatch(process.pid)) for process in processes]
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        peak_bytes = sum(watch.take_peak() for watch in watches)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"ranks {failed} of {case} have failed")
    steps = [[json.loads(line) for line in text.splitlines()][work.warmup :] for text in printed]
    first = steps[0]
    own_cpu_s = [sum(rank[number]["cpu_s"] for rank in steps) for number in range(len(first))]
    foreign = [
        max(0.0, step["busy_cpu_s"] - own) / step["seconds"] / (os.cpu_count() or 1)
        for step, own in zip(first, own_cpu_s, strict=True)
    ]
    return {
        "seconds": statistics.median(step["seconds"] for step in first),
        "cpu_s": statistics.median(own_cpu_s),
        "foreign_cpu_share": statistics.median(foreign),
        "disk_bytes": statistics.median(
            sum(rank[number]["read_bytes"] + rank[number]["written_bytes"] for rank in steps)
            for number in range(len(first))
        ),
        "peak_bytes": peak_bytes,
        "losses": [step["loss"] for step in first],
        "stats": first[-1]["stats"],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratios(rounds: Sequence[dict[str, dict[str, Any]]], what: str) -> dict[str, dict[str, float]]:
    """By pair, the median, least and largest of the rounds' ratios."""
    found = {}
    for ours, peer in RATIOS:
        values = [one[ours][what] / one[peer][what] for one in rounds if ours in one and peer in one]
        if values:
            found[f"{ours} / {peer}"] = spread(values)
    return found


def of_bound(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Steps that move bytes to and from the disk, as parts of max(step in memory, bytes / mixed rate of the disk).

    The step in memory is that of the same order of micro-batches. Without its row the disk alone is the bound.
    ``"time"``: the step. ``"CPU"``: what its processor time alone takes with all cores busy, so that ``time`` can be no
    less.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for one in rounds:
        for name in (name for name, row in one.items() if "disk_bytes_per_s" in row):
            row = one[name]
            in_memory = one.get("ours memory vertical" if "vertical" in name else "ours memory", {"seconds": 0.0})
            bound_s = max(row["disk_bytes"] / row["disk_bytes_per_s"], in_memory["seconds"])
            values = found.setdefault(name, {"time": [], "CPU": []})
            values["time"].append(row["seconds"] / bound_s)
            values["CPU"].append(row["cpu_s"] / (os.cpu_count() or 1) / bound_s)
    return {name: {what: spread(values) for what, values in kinds.items()} for name, kinds in found.items()}


def with_disk_rate(disk: DiskRate, run_row: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row, and what the best tool gets of the disk: the mean of the rates before and after it."""
    before = max(disk.measure().values())
    row = run_row()
    after = max(disk.measure().values())
    return row | {"disk_bytes_per_s": statistics.harmonic_mean((before, after))}


def measure(
    work: Work,
    *,
    ranks: int,
    rounds: int,
    rows: Sequence[str],
    path: str,
    host_budget: str,
    deepspeed_python: str | None,
) -> dict[str, Any]:
    """All rows in turns, ``rounds`` times."""
    known = cases(host_budget)
    alike = ("accumulation_order",) if work.accumulate == 1 else ()  # one micro-batch has one order
    every = [name for name, case in known.items() if not any(key in case.settings for key in alike)]
    chosen = [name for name in (rows or every) if known[name].side != "deepspeed" or deepspeed_python]
    on_disk = [name for name in chosen if known[name].side == "ours" and known[name].settings["disk"]]
    found: list[dict[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        disk = stack.enter_context(DiskRate(path, fio=False, file_bytes=FILE_BYTES)) if on_disk else None
        for number in range(rounds):
            one: dict[str, dict[str, Any]] = {}
            for name in [*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]]:
                run_row = partial(run, known[name], work, ranks, path, deepspeed_python)
                one[name] = run_row() if disk is None or name not in on_disk else with_disk_rate(disk, run_row)
                print(
                    f"round {number + 1}/{rounds} {name:22} {one[name]['seconds']:7.2f} s  "
                    f"{one[name]['cpu_s']:7.2f} CPU s  {one[name]['peak_bytes'] / 1e9:6.2f} GB  "
                    f"{one[name]['disk_bytes'] / 1e9:6.2f} GB of disk",
                    file=sys.stderr,
                    flush=True,
                )
            found.append(one)
    return {
        "question": "How long is a step on several ranks, next to DDP, FSDP2 and DeepSpeed?",
        "work": work.__dict__ | {"ranks": ranks, "threads_per_rank": 1, "host_budget_nvme": host_budget},
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__},
        "ratios": ratios(found, "seconds"),
        "cpu_ratios": ratios(found, "cpu_s"),
        "memory_ratios": ratios(found, "peak_bytes"),
        "of_bound": of_bound(found),
        "rounds": found,
    }
