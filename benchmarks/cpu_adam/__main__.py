"""How close do the host kernels come to the memory's limit, and how do they compare with torch and DeepSpeed?

    pip install -e ".[bench-peers]"
    python -m benchmarks.cpu_adam

Every round runs every contender once, in random order. A ratio is the median over the rounds of "bytes that the
algorithm must move, over time", divided by the better of two Adam-shaped streams in C (4 reads, 3 in-place writes) of
the same round. "The whole update" begins with a bf16 gradient from autograd and ends with the bf16 weight: global norm,
unscale, clip, step on the fp32 master; DeepSpeed's is written after its code (zero_parts.py; whole.py runs its own
engine). "What follows the norm" is that without the landing, for 28 bytes per parameter. The JSON goes to
benchmarks/results/; --add keeps the runs that it has. Peers that are installed take part. Many small parameters are
another question: many.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_adam import contenders as c
from benchmarks.cpu_adam.buffers import Buffers
from benchmarks.cpu_adam.contenders import Contender, contenders, load_stream
from benchmarks.cpu_adam.machine import RESULTS, machine, parse_size

LARGE = 1 << 26
"""Parameters from which on the targets hold: nothing of it stays in a cache."""

OF_THE_LIMIT = {c.FP32: 0.95, c.MASTER: 0.90, c.SPLIT: 0.90, c.ALL16: 0.85, **dict.fromkeys(c.LANDINGS, 0.85)}
TIMES_AS_FAST = (
    (c.FP32, c.TORCH, 1.0),
    (c.FP32, c.DEEPSPEED, 1.0),
    (c.OPTIMIZER, c.TORCH, 1.0),
    (c.OPTIMIZER, c.DEEPSPEED, 1.0),
    (c.ALL16, c.TORCH16, 1.0),
    (c.ALL16, c.DEEPSPEED16, 1.0),
    (c.WITH_LANDING, c.ZERO3, 3.5),
    (c.MASTER, c.ZERO3_STEP, None),
    (c.LANDINGS[1], c.COPY, None),
    *((name, c.ONE_BY_ONE[count], None) for count, name in c.PARTS.items()),
)
"""Ours, the peer that does the same work, and how many times as fast we want to be; None: for information."""


def measure(entries: dict[str, Contender], n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round."""
    names = list(entries)
    repeats = max(1, (1 << 22) // n)  # small sizes: enough calls to be above the clock's grain
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for round_index in range(rounds + 1):
        order.shuffle(names)  # so that none always follows the same other one
        for name in names:
            run = entries[name].run
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            elapsed = (time.perf_counter() - started) / repeats
            if round_index > 0:  # the first round pages everything in
                seconds[name].append(elapsed)
    return seconds


def summarise(entries: dict[str, Contender], seconds: dict[str, list[float]], n: int) -> dict[str, dict[str, Any]]:
    gbs = {name: [entries[name].bytes_per_param * n / s / 1e9 for s in values] for name, values in seconds.items()}
    limits = [max(pair) for pair in zip(*(gbs[name] for name in c.STREAMS), strict=True)]
    return {
        name: {
            "bytes_per_param": entries[name].bytes_per_param,
            "median_gb_s": round(statistics.median(values), 2),
            "ns_per_param": statistics.median(seconds[name]) / n * 1e9,
            "ratio_to_limit": statistics.median([value / limit for value, limit in zip(values, limits, strict=True)]),
            "rounds_s": seconds[name],
        }
        for name, values in gbs.items()
    }


def compare(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, and what was reached: medians of the rounds' ratios."""
    found = [
        {"what": f"{name} / limit", "ratio": rows[name]["ratio_to_limit"], "at_least": least}
        for name, least in OF_THE_LIMIT.items()
    ]
    for mine, peer, least in TIMES_AS_FAST:
        if peer in rows:
            pairs = zip(rows[peer]["rounds_s"], rows[mine]["rounds_s"], strict=True)
            ratio = statistics.median([theirs / own for theirs, own in pairs])
            found.append({"what": f"time of {peer} / {mine}", "ratio": ratio, "at_least": least})
    return found


def show(run: dict[str, Any]) -> None:
    pages = "huge" if run["huge_pages"] else "ordinary"
    print(f"\n{run['parameters']:,} parameters, {run['threads']} thread(s), {pages} pages")
    print(f"{'':50s} B/param     GB/s    ns/param  of the limit")
    for name, row in run["rows"].items():
        print(
            f"{name:50s} {row['bytes_per_param']:7.0f} {row['median_gb_s']:8.1f} {row['ns_per_param']:11.3f}"
            f" {row['ratio_to_limit']:13.2f}"
        )
    for line in run["compared"]:
        wanted = "" if line["at_least"] is None else f"   (to reach: {line['at_least']})"
        print(f"{line['ratio']:8.2f}  {line['what']}{wanted}")


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(run["threads"] for run in runs)
    chosen = {run["parameters"]: run["rows"] for run in runs if run["threads"] == threads and run["huge_pages"]}
    drawn = (c.FP32, c.OPTIMIZER, c.TORCH, c.DEEPSPEED, c.MASTER, c.ZERO3_STEP, c.WITH_LANDING, c.ZERO3)
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    for name in ("stream", *drawn):
        rows = [(n, rows[name]["ns_per_param"]) for n, rows in sorted(chosen.items()) if name in rows]
        style = "k--" if name == "stream" else "o-" if name.startswith("ours") else "s:"
        axes.plot([n for n, _ in rows], [ns for _, ns in rows], style, label=name, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ns per parameter", title=f"{threads} thread(s)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["64M", "128M", "256M"], help="parameters, such as 1k 1M 256M")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    installed = ["torch", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
    parser.add_argument("--peers", nargs="*", default=installed, choices=["torch", "torch-slow", "deepspeed"])
    parser.add_argument("--pages", choices=["huge", "ordinary"], default="huge", help="under everybody's buffers")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders with one of these in their names, and streams"
    )
    parser.add_argument("--add", action="store_true", help="to the runs that --out has")
    parser.add_argument("--plot", action="store_true", help="time per parameter against size, next to the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_adam.json")
    options = parser.parse_args()
    if "deepspeed" not in options.peers:
        print('DeepSpeed does not take part: pip install -e ".[bench-peers]"', file=sys.stderr)
    library, runs = load_stream(), []
    if options.add and options.out.exists():
        runs = json.loads(options.out.read_text())["runs"]
    report = {"question": "host kernels against the memory's limit", "machine": machine(), "runs": runs}
    for n in map(parse_size, options.sizes):
        buffers = Buffers(n, huge_pages=options.pages == "huge")
        for threads in options.threads:
            torch.set_num_threads(threads)
            entries = contenders(buffers, threads, library, options.peers)
            chosen = {k: v for k, v in entries.items() if k in c.STREAMS or any(part in k for part in options.only)}
            entries = chosen if options.only else entries
            rows = summarise(entries, measure(entries, n, options.rounds), n)
            compared = compare(rows) if n >= LARGE and not options.only else []
            setting = {"parameters": n, "threads": threads, "rounds": options.rounds}
            runs.append({**setting, "huge_pages": options.pages == "huge", "compared": compared, "rows": rows})
            show(runs[-1])
        del buffers, entries
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(runs, options.out.with_suffix(".png"))
    print(f"\nwritten: {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
