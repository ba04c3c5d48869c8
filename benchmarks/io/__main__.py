"""Does any tool get more out of this disk than our engine does?

    python -m benchmarks.io --path /mnt/nvme

Reads, writes, and both at once, 1 to 16 MiB per block: deepoffload's backends, a plain pread/pwrite loop (one thread,
and as many as blocks are in flight), fio where it is installed, DeepSpeed's aio_handle where it can be imported. All
contenders prepare themselves for a pattern and a block size; then every round runs each of them once, shortly, in
rotating order, because a disk may change its rate by a third within seconds. A ratio is the median over the rounds of
ours by another tool in the same round. Small requests, requests of different sizes, and memory that nobody prepared
are measured against aio_handle alone (small.py). The JSON with the machine goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.io.contenders import Contender, DeepSpeed, Fio, Ours, PlainLoop, huge_memory
from benchmarks.io.load import ForeignLoad
from benchmarks.io.small import small_cases, submit_cost
from deepoffload.cli.nvme.data import PERIOD_BYTES
from deepoffload.cli.nvme.files import BenchFile, check_room
from deepoffload.cli.nvme.job import Effort, Job
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.cli.nvme.types import Pattern, Sample, Setting
from deepoffload.io.engine import BACKENDS, probe_backend
from deepoffload.io.swap_files import check_paths
from deepoffload.native.aio import HostMapping

RESULTS = Path(__file__).resolve().parents[1] / "results"
MIB = 1 << 20
CELLS = ((MIB, 16), (4 * MIB, 16), (16 * MIB, 4))
"""Block size in bytes and blocks in flight."""

Samples = dict[tuple[Pattern, int, int], dict[str, list[Sample]]]


def fill(file: BenchFile, memory: HostMapping) -> None:
    """First writes, which are slower than all later ones."""
    with Job(Setting("pool", MIB, 16, True, 1), [[file]], [memory], threading.Event()) as job:
        job.fill(time.monotonic() + 600)


def make_contenders(shared: BenchFile, checked: BenchFile, memory: HostMapping) -> list[Contender]:
    found: list[Contender] = [Ours(name, shared, checked, memory) for name in BACKENDS if probe_backend(name).available]
    found += [PlainLoop(threads, shared, memory) for threads in (False, True)]
    if shutil.which("fio"):
        found += [Fio(engine, shared) for engine in ("libaio", "io_uring") if probe_backend(engine).available]
    if importlib.util.find_spec("deepspeed"):
        found += [DeepSpeed(shared, huge_pages=huge) for huge in (False, True)]
    return found


def measure(
    contenders: list[Contender], patterns: list[Pattern], rounds: int, effort: Effort
) -> tuple[Samples, list[float]]:
    """Samples, and the share of the processors that others took while each pattern and block size was measured."""
    samples: Samples = {}
    foreign: list[float] = []
    for pattern, (block, depth) in ((p, c) for p in patterns for c in CELLS):
        with ExitStack() as stack:
            turns = [(one.name, one.prepare(stack, pattern, block, depth)) for one in contenders]
            found: dict[str, list[Sample]] = {one.name: [] for one in contenders}
            load = ForeignLoad()
            for index in range(rounds):
                print(f"\r{pattern.value} {block >> 20} MiB, round {index + 1}/{rounds}   ", end="", file=sys.stderr)
                first = index % len(turns)
                for name, turn in turns[first:] + turns[:first]:
                    found[name].append(turn(effort))
            foreign.append(load.share())
        samples[pattern, block, depth] = found
    print(file=sys.stderr)
    return samples, foreign


def is_ours(name: str) -> bool:
    return name.startswith("deepoffload")


def ratio(by_name: dict[str, list[Sample]], name: str) -> float:
    """Median over the rounds of this one's rate by that of the best other tool in the same round."""
    others = [samples for other, samples in by_name.items() if not is_ours(other)]
    rounds = zip(by_name[name], *others, strict=True)
    return statistics.median(mine.bytes_per_s / max(s.bytes_per_s for s in rest) for mine, *rest in rounds)


def ratio_to_steadiest(by_name: dict[str, list[Sample]], name: str) -> float:
    """The same against the one other tool whose median is best: the best of several noisy ones is partly luck."""
    others = {other: samples for other, samples in by_name.items() if not is_ours(other)}
    best = max(others, key=lambda other: statistics.median(s.bytes_per_s for s in others[other]))
    pairs = zip(by_name[name], others[best], strict=True)
    return statistics.median(mine.bytes_per_s / theirs.bytes_per_s for mine, theirs in pairs)


def cell_row(name: str, by_name: dict[str, list[Sample]]) -> dict[str, Any]:
    rates = [sample.bytes_per_s / 1e6 for sample in by_name[name]]
    row: dict[str, Any] = {
        "tool": name,
        "median_mb_s": statistics.median(rates),
        "min_mb_s": min(rates),
        "max_mb_s": max(rates),
        "cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in by_name[name]),
        "samples_mb_s": rates,
    }
    if is_ours(name):
        row["ratio_to_best_other_each_round"] = ratio(by_name, name)
        row["ratio_to_best_other_by_median"] = ratio_to_steadiest(by_name, name)
    return row


def best_settings(samples: Samples, patterns: list[Pattern]) -> list[dict[str, Any]]:
    """Each tool's best cell by median, ours against the best of the others, round by round."""
    rows = []
    for pattern in patterns:
        best: dict[str, tuple[tuple[Pattern, int, int], float]] = {}
        for cell, by_name in samples.items():
            for name, found in by_name.items():
                rate = statistics.median(sample.bytes_per_s for sample in found)
                if cell[0] is pattern and rate > best.get(name, (cell, 0.0))[1]:
                    best[name] = (cell, rate)
        mine = max((name for name in best if is_ours(name)), key=lambda name: best[name][1])
        other = max((name for name in best if not is_ours(name)), key=lambda name: best[name][1])
        pairs = zip(samples[best[mine][0]][mine], samples[best[other][0]][other], strict=True)
        rows.append(
            {
                "pattern": pattern.value,
                **{
                    side: {"tool": name, "block_bytes": best[name][0][1], "depth": best[name][0][2],
                           "median_mb_s": best[name][1] / 1e6}
                    for side, name in (("ours", mine), ("best_other", other))
                },
                "ratio": statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in pairs),
            }
        )  # fmt: skip
    return rows


def show(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        print(f"\n{cell['pattern']}, {cell['block_bytes'] >> 20} MiB x {cell['depth']}")
        for row in sorted(cell["rows"], key=lambda row: -row["median_mb_s"]):
            shown = (
                f"  {row['tool']:26} {row['median_mb_s']:6.0f} MB/s ({row['min_mb_s']:.0f} to {row['max_mb_s']:.0f})"
            )
            shown += f"  CPU {row['cpu_s_per_gb']:.3f} s/GB"
            if "ratio_to_best_other_each_round" in row:
                shown += f"  ratio {row['ratio_to_best_other_by_median']:.3f}"
                shown += f", to each round's best {row['ratio_to_best_other_each_round']:.3f}"
            print(shown)
    print("\nbest setting against best setting")
    for row in report["best"]:
        sides = [f"{row[side]['tool']} {row[side]['block_bytes'] >> 20} MiB {row[side]['median_mb_s']:.0f} MB/s"
                 for side in ("ours", "best_other")]  # fmt: skip
        print(f"  {row['pattern']:5}  {sides[0]} against {sides[1]}: {row['ratio']:.3f}")
    for row in report["small"]:
        print(f"  {row['case']}, {row['pattern']}: {row['ours_mb_s']:.0f} against {row['deepspeed_mb_s']:.0f} MB/s: "
              f"{row['ratio']:.2f}")  # fmt: skip
    print("  submitting 64 MiB: " + ", ".join(f"{name} {value:.0f}" for name, value in report["submit_64_mib"].items()))
    print(
        "  others took "
        + ", ".join(f"{share:.0%}" for share in report["foreign_cpu_share_each_cell"])
        + " of the cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--size", type=int, default=512, help="MiB of each of the two test files")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--warmup", type=float, default=0.05, help="seconds before it")
    parser.add_argument("--patterns", nargs="+", default=[p.value for p in Pattern], choices=[p.value for p in Pattern])
    parser.add_argument("--json", type=Path, default=RESULTS / "io.json")
    given = parser.parse_args()
    (directory,) = check_paths([given.path], key="--path")
    size = given.size * MIB // (32 * MIB) * (32 * MIB)
    if size < 64 * MIB or size % PERIOD_BYTES or given.rounds < 1 or given.seconds <= 0:
        parser.error("--size is at least 64 (MiB), --rounds at least 1, --seconds above 0")
    check_room([directory], 2 * size)
    machine = describe_machine([directory])
    patterns = [Pattern(name) for name in given.patterns]
    with ExitStack() as stack:
        memory = huge_memory(stack, size)
        shared, checked = (stack.enter_context(BenchFile(directory, serial, size)) for serial in (0, 1))
        fill(shared, memory)
        fill(checked, memory)
        contenders = make_contenders(shared, checked, memory)
        submit = submit_cost(shared)
        samples, foreign = measure(contenders, patterns, given.rounds, Effort(given.warmup, given.seconds))
        deepspeed = next((one for one in contenders if isinstance(one, DeepSpeed)), None)
        small = small_cases(deepspeed, shared, given.rounds) if deepspeed else []
    report = {
        "question": "our engine against every other tool, same disk, same run",
        "machine": machine,
        "rounds": given.rounds,
        "file_bytes": size,
        "seconds": given.seconds,
        "warmup_s": given.warmup,
        "cells": [
            {"pattern": p.value, "block_bytes": b, "depth": d, "rows": [cell_row(name, by_name) for name in by_name]}
            for (p, b, d), by_name in samples.items()
        ],
        "deepspeed_huge_page_share_min": [one.huge_page_share_min for one in contenders if isinstance(one, DeepSpeed)],
        "best": best_settings(samples, patterns),
        "small": small,
        "submit_64_mib": submit,
        "foreign_cpu_share_each_cell": foreign,
    }
    show(report)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {given.json}")


if __name__ == "__main__":
    main()
