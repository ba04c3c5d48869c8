"""What was measured, as text and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.end_to_end.cases import Case, Work
from benchmarks.end_to_end.runner import Run
from benchmarks.end_to_end.targets import Result, Round

KEYS = ("seconds", "forward_s", "backward_s", "update_s", "read_bytes", "written_bytes", "peak_bytes", "cpu_s",
        "foreign_cpu_share", "foreign_disk_bytes", "loss")  # fmt: skip
STATS = ("faults", "waits", "wait_s", "prefetches", "evictions", "compactions", "disk_bytes_read", "disk_bytes_written")


def case_json(case: Case, rounds: Sequence[Round]) -> dict[str, Any]:
    runs = [round.runs[case.name] for round in rounds if case.name in round.runs]
    return {"case": case.name, "text": case.text, "settings": case.settings, "runs": [run_json(run) for run in runs]}


def run_json(run: Run) -> dict[str, Any]:
    return {
        "ready_s": run.ready_s,
        "finish_s": run.finish_s,
        "losses": run.losses,
        "steps": [{key: step[key] for key in KEYS} for step in run.steps],
        "counted_steps": len(run.counted),
        "per_step": {key: run.stat_per_step(key) for key in STATS if key in run.stats_start},
        "notes": run.notes,
    }


def report_json(
    work: Work, cases: Sequence[Case], rounds: Sequence[Round], results: Sequence[Result], machine: dict[str, Any]
) -> dict[str, Any]:
    return {
        "question": "one training step: deepoffload, plain PyTorch and DeepSpeed in turn on the same disk",
        "machine": machine,
        "work": {**asdict(work), "parameters": work.num_parameters},
        "cases": [case_json(case, rounds) for case in cases],
        "disk_bytes_per_s": [round.rates for round in rounds],
        "to_reach": [
            {**asdict(result), "median": result.median if math.isfinite(result.median) else None} for result in results
        ],
    }


def case_lines(cases: Sequence[Case], rounds: Sequence[Round]) -> list[str]:
    heading = (
        f"{'':30} {'step s: min median max':>22}  {'fwd':>5} {'bwd':>5} {'upd':>5} {'peak MB':>8} {'read MB':>8}"
        f" {'writ. MB':>8} {'wait s':>6} {'faults':>6} {'foreign CPU':>11} {'quiet':>7}  losses"
    )
    lines = [heading]
    for case in cases:
        runs = [round.runs[case.name] for round in rounds if case.name in round.runs]
        steps = [step for run in runs for step in run.counted]
        if not steps:
            continue
        every = [step for run in runs for step in run.steps]
        times = [step["seconds"] for step in steps]
        middle = {key: statistics.median(step[key] for step in steps) for key in KEYS}
        wait = statistics.median(run.stat_per_step("wait_s") for run in runs)
        faults = statistics.median(run.stat_per_step("faults") for run in runs)
        lines.append(
            f"{case.name:30} {min(times):6.2f} {statistics.median(times):7.2f} {max(times):7.2f} "
            f" {middle['forward_s']:5.2f} {middle['backward_s']:5.2f} {middle['update_s']:5.2f}"
            f" {max(run.peak_bytes for run in runs) / 1e6:8.0f} {middle['read_bytes'] / 1e6:8.0f}"
            f" {middle['written_bytes'] / 1e6:8.0f} {wait:6.2f} {faults:6.0f}"
            f" {middle['foreign_cpu_share']:6.0%} {max(s['foreign_cpu_share'] for s in steps):4.0%}"
            f" {sum(s['foreign_cpu_share'] <= runs[0].foreign_share_max for s in every):3}/{len(every):3}"
            f"  {' '.join(f'{loss:.4f}' for loss in runs[-1].losses[:4])}"
        )
    return lines


def rate_lines(rounds: Sequence[Round]) -> list[str]:
    tools = {tool for round in rounds for tool in round.rates}
    return [
        f"disk, reading and writing at once: {tool:24} "
        + " ".join(f"{round.rates[tool] / 1e6:.0f}" for round in rounds if tool in round.rates)
        + " MB/s"
        for tool in sorted(tools)
    ]


def target_lines(results: Sequence[Result]) -> list[str]:
    lines = [f"{'':62} {'target':>8} {'median':>8} {'min':>7} {'max':>7}"]
    for result in results:
        if not math.isfinite(result.median):
            lines.append(f"{result.name:62} {result.target:8.2f} {'':24} MISSED: more memory than the other side")
            continue
        lines.append(
            f"{result.name:62} {result.target:8.2f} {result.median:8.3f} {min(result.values):7.3f}"
            f" {max(result.values):7.3f} {'met' if result.met else 'MISSED'} {result.unit}"
        )
    return lines
