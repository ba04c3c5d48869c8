"""Step time against the memory budget, and against the size of the model.

    python -m benchmarks.end_to_end.sweep budget --path /mnt/nvme --size 319m --plot
    python -m benchmarks.end_to_end.sweep size --path /mnt/nvme --plot

``budget`` goes from a fortieth of weights, gradients and optimizer state to all of it; ``size`` from 125 M to 1.24 B
parameters with everything in memory, the optimizer on NVMe, and everything there. Rounds are interleaved, every run is
a process of its own, and points are medians over the rounds with the least and the most. Each point stands next to the
bound of its round: its bytes at the best mixed disk rate, or the step with everything in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.cases import BYTES, OVERLAPS, Case, Work, budget_case, ours
from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.report import run_json
from benchmarks.end_to_end.runner import RESULTS, CaseFailedError, Run, end_with_children, run_case
from benchmarks.end_to_end.targets import Round, bound_seconds
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.io.swap_files import check_paths

SHARES = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.03)
"""Of weights, gradients and optimizer state; the last has room for alignment, too."""
SIZES = ("125m", "319m", "620m", "1.24b")
FILE_BYTES = 512 << 20
PLACES = ("host", "optimizer", "all")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("budget", "size"))
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m", help="of the model whose budget is swept")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), default=list(SIZES))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="budgets, as parts of everything")
    parser.add_argument("--overlap", nargs="+", choices=OVERLAPS[:2], default=["deferred"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--plot", action="store_true", help="draw it (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="not said: benchmarks/results/end_to_end_WHAT.json")
    return parser.parse_args(arguments)


Point = tuple[Work, Case, str, str]
"""What to run, the curve that it belongs to, and the case of the same work with everything in memory."""


def points_of(said: argparse.Namespace) -> list[Point]:
    work = Work(said.size, said.batch, said.seq, steps=said.steps, steps_max=2 * said.steps, threads=said.threads)
    found: list[Point] = []
    if said.what == "budget":
        everything = work.num_parameters * sum(BYTES.values())
        budgets = [int(share * everything) for share in sorted(said.shares)]
        for overlap in said.overlap:
            all_in = budget_case(work, overlap, max(budgets)).name
            found += [(work, budget_case(work, overlap, budget), overlap, all_in) for budget in budgets]
        return found
    for size in said.sizes:
        sized = replace(work, size=size)
        for overlap in said.overlap:
            found += [
                (sized, case, f"{place} {overlap}", f"host-{overlap}")
                for case in ours(sized, overlap)
                for place in PLACES
                if case.name.startswith(f"{place}-")
            ]
    return found


def measure(said: argparse.Namespace, points: Sequence[Point]) -> list[dict[str, Round]]:
    """Each round by size of the model. A budget that is refused has no run."""
    rounds = []
    with DiskRate(said.path, fio=False, file_bytes=FILE_BYTES) as disk:
        for number in range(said.rounds):
            this: dict[str, Round] = {}
            rounds.append(this)
            for work, case, _, _ in points[:: -1 if number % 2 else 1]:
                mine = this.setdefault(work.size, Round(rates={}))
                mine.rates = mine.rates or disk.measure()
                try:
                    run = mine.runs[case.name] = run_case(case, work, said.path, sys.executable)
                except CaseFailedError as error:
                    if "PlacementError" not in str(error) and "BudgetError" not in str(error):
                        raise
                    print(f"{case.name}: refused", file=sys.stderr)
                    continue
                print(f"round {number + 1}/{said.rounds} {work.size:6} {case.name:30} {run.median('seconds'):.3f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
    return rounds


def row(point: Point, rounds: Sequence[dict[str, Round]]) -> dict[str, Any] | None:
    work, case, curve, in_memory = point
    mine = [each[work.size] for each in rounds if case.name in each[work.size].runs]
    if not mine:
        return None
    runs: list[Run] = [each.runs[case.name] for each in mine]
    times = [run.median("seconds") for run in runs]
    return {
        "curve": curve,
        "size": work.size,
        "parameters": work.num_parameters,
        "case": case.name,
        "host_budget_bytes": case.settings["host_budget"],
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "bound_s": statistics.median(bound_seconds(each, case.name, in_memory) for each in mine),
        "disk_bytes": statistics.median(run.median("read_bytes") + run.median("written_bytes") for run in runs),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "faults": statistics.median(run.stat_per_step("faults") for run in runs),
        "losses": runs[0].losses[:5],
        "runs": [run_json(run) for run in runs],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':34} {'budget MB':>9} {'step s':>7} {'min':>7} {'max':>7} {'bound':>7} {'ratio':>6} {'ns/param':>8}"
          f" {'B/param':>7} {'peak MB':>8} {'faults':>6}")  # fmt: skip
    for each in rows:
        n = each["parameters"]
        print(
            f"{each['size']:6} {each['curve']:27} {each['host_budget_bytes'] / 1e6:9.0f} {each['median_s']:7.3f}"
            f" {each['min_s']:7.3f} {each['max_s']:7.3f} {each['bound_s']:7.3f}"
            f" {each['median_s'] / each['bound_s']:6.2f} {each['median_s'] / n * 1e9:8.2f}"
            f" {each['disk_bytes'] / n:7.1f} {each['peak_bytes'] / 1e6:8.0f} {each['faults']:6.0f}"
        )


def plot(what: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for curve in dict.fromkeys(each["curve"] for each in rows):
        mine = [each for each in rows if each["curve"] == curve]
        if what == "budget":
            scale, xs = 1.0, [each["host_budget_bytes"] / 1e9 for each in mine]
        else:
            scale, xs = 1e9, [each["parameters"] / 1e6 for each in mine]
        ys = [[each[key] * (scale / each["parameters"] if what == "size" else 1.0) for each in mine]
              for key in ("median_s", "min_s", "max_s", "bound_s")]  # fmt: skip
        lines = axes.plot(xs, ys[0], "o-", label=curve, markersize=4)
        axes.fill_between(xs, ys[1], ys[2], alpha=0.15, color=lines[0].get_color())
        axes.plot(xs, ys[3], "--", label=f"{curve}: bound", color=lines[0].get_color(), linewidth=1)
    if what == "budget":
        axes.set(xlabel="memory for weights, gradients and optimizer state, GB", ylabel="seconds per step")
    else:
        axes.set(xlabel="million parameters", ylabel="ns per parameter and step", xscale="log")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> int:
    end_with_children()
    said = parse(arguments)
    (directory,) = check_paths([said.path], key="--path")
    machine = describe_machine([directory])
    points = points_of(said)
    try:
        rounds = measure(said, points)
    except CaseFailedError as error:
        print(f"sweep.py: error: {error}", file=sys.stderr)
        return 1
    rows = [found for point in points if (found := row(point, rounds)) is not None]
    show(rows)
    out = said.json or RESULTS / f"end_to_end_{said.what}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rates = [{size: each.rates for size, each in this.items()} for this in rounds]
    report = {"question": f"step time against {said.what}", "machine": machine, "rows": rows, "disk_bytes_per_s": rates}
    out.write_text(json.dumps(report, indent=1) + "\n")
    if said.plot:
        plot(said.what, rows, out.with_suffix(".png"))
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
