"""Step time and bytes of both orders of accumulation, in turns on the same disk::

    python -m benchmarks.accumulation --path /mnt/nvme --micro-batches 4 16 --rows all optimizer host --predict
    python -m benchmarks.accumulation --path /mnt/nvme --micro-batches 8 16 --disk-rate 1GB --predict

Each row is a placement of benchmarks/end_to_end in a process of its own. Each round makes some steps in one order, of
which the first ones teach the engine its trace, and as many in the other. A ratio is the median over the rounds of
"median step in vertical order by that in horizontal order". ``--disk-rate`` slows all transfers down to that of a
slower disk, reads and writes together. With ``--predict`` and the row ``host`` the least times that this disk allows
stand next to what was measured: see ``benchmarks.accumulation.bound``.
The row ``by-hand`` is plain PyTorch with everything in memory, its two orders written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.accumulation.bound import Computing, bounds_of
from benchmarks.accumulation.plot import svg
from benchmarks.accumulation.row import ORDERS
from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.cases import OVERLAPS
from benchmarks.end_to_end.runner import ROOT, end_with_children, environment
from deepoffload.config.units import parse_bytes

BY_HAND = "by-hand"
"""Plain PyTorch with everything in memory: what the order itself costs."""

HEAD = f"{'':10} {'k':>3} {'horizontal s':>12} {'B/param':>8} {'vertical s':>11} {'B/param':>8} {'ratio':>6}  rounds"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accumulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", required=True, help="directory on the disk that is measured")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--rows", nargs="+", choices=("host", "half", "optimizer", "all", BY_HAND), default=["all"])
    parser.add_argument("--overlap", choices=OVERLAPS, default="deferred", help="step_overlap")
    parser.add_argument("--clip", type=float, default=1.0, help="global norm; guesses need steps that do not clip")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seq", type=int, default=128, help="tokens in a micro-batch, which has one row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured ones, in each round and order")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--disk-rate", type=parse_bytes, metavar="BYTES", help="per second, at most; such as 1GB")
    parser.add_argument("--predict", action="store_true", help="what the estimators predict of these steps, too")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="step time and bytes of the first row against k")
    return parser.parse_args()


@contextmanager
def slow_disk(rate: int | None) -> Iterator[dict[str, str]]:
    """What the environment says more where transfers are slowed down. Kept measurements are those of the slow disk."""
    if rate is None:
        yield {}
        return
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise SystemExit(f"--disk-rate needs a C compiler, and there is no {compiler[0]}")
    with tempfile.TemporaryDirectory() as folder:
        library, source = f"{folder}/slow_disk.so", Path(__file__).with_name("slow_disk.c")
        subprocess.run([*compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl", "-lpthread"], check=True)
        yield {"LD_PRELOAD": library, "SLOW_DISK_BYTES_PER_S": str(rate), "XDG_CACHE_HOME": folder}


def measure(said: argparse.Namespace, row: str, more: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What the process of a row says, a number of micro-batches after the other."""
    names = ("path", "size", "overlap", "micro_batches", "seq", "rounds", "steps", "threads", "predict", "clip")
    spec = {name: getattr(said, name) for name in names} | {"row": row}
    command = [
        sys.executable,
        "-m",
        f"benchmarks.accumulation.{'by_hand' if row == BY_HAND else 'row'}",
        json.dumps(spec),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(said.threads) | more, cwd=ROOT)
    assert child.stdout is not None
    try:
        yield from map(json.loads, child.stdout)
        if child.wait():
            raise SystemExit(f"the process of {row} ended with status {child.returncode}")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def of_order(found: dict[str, Any], order: str, key: str) -> float:
    return statistics.median(step[key] for steps in found["rounds"][order] for step in steps)


def ratios(found: dict[str, Any]) -> list[float]:
    """By round, vertical against horizontal."""
    medians = [
        [statistics.median(step["seconds"] for step in steps) for steps in found["rounds"][order]] for order in ORDERS
    ]
    return [vertical / horizontal for horizontal, vertical in zip(*medians, strict=True)]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For people."""
    columns = " ".join(
        f"{of_order(found, order, 'seconds'):{width}.3f} {of_order(found, order, 'bytes'):8.1f}"
        for order, width in zip(ORDERS, (12, 11), strict=True)
    )
    by_round = ratios(found)
    yield (
        f"{found['row']:10} {found['k']:3d} {columns} {statistics.median(by_round):6.2f}  "
        + " ".join(f"{ratio:.2f}" for ratio in by_round)
    )
    for order, predicted in found.get("predicted", {}).items():
        off = {key: predicted[key] / max(of_order(found, order, key), 1e-9) - 1 for key in ("seconds", "bytes")}
        bytes_off = f" ({off['bytes']:+.0%})" if predicted["bytes"] else ""
        yield (
            f"{'':14} predicted, {order}: {predicted['seconds']:.3f} s ({off['seconds']:+.0%}), "
            f"{predicted['bytes']:.1f} B/param{bytes_off}"
        )


def bound_lines(every: list[dict[str, Any]]) -> Iterator[str]:
    """The least time of each row that has moved something, where its work was done in memory, too."""
    in_memory = {found["k"]: found["rounds"]["horizontal"] for found in every if found["row"] == "host"}
    for found in every:
        if "moves" not in found or found["row"] == "host" or found["k"] not in in_memory:
            continue
        computing = Computing.of([step for steps in in_memory[found["k"]] for step in steps])
        found["bounds"] = bounds = bounds_of(found, computing)
        each = ", ".join(
            f"{order} {bound_s:.3f} s (measured: {of_order(found, order, 'seconds') / bound_s:.2f} of it)"
            for order, bound_s in bounds.items()
        )
        yield f"{found['row']:10} {found['k']:3d} least: {each}; ratio {bounds['vertical'] / bounds['horizontal']:.2f}"


def picture(said: argparse.Namespace, every: list[dict[str, Any]]) -> str:
    first = [found for found in every if found["row"] == said.rows[0]]
    names = {"seconds of a step": "seconds", "bytes per parameter and step": "bytes"}
    panels = {
        name: {order: [(found["k"], of_order(found, order, key)) for found in first] for order in ORDERS}
        for name, key in names.items()
    }
    disk = f", a disk of {said.disk_rate / 1e9:g} GB/s" if said.disk_rate else ""
    return svg(f"{said.size} parameters, row {said.rows[0]}, micro-batches of 1 x {said.seq} tokens{disk}", panels)


def main() -> None:
    end_with_children()
    said = arguments()
    every: list[dict[str, Any]] = []

    def write() -> None:
        """What was measured stays when a later row fails."""
        if said.json:
            kept = vars(said) | {"json": str(said.json), "plot": str(said.plot), "load": os.getloadavg()[0]}
            said.json.write_text(json.dumps({"arguments": kept, "rows": every}, indent=1) + "\n")

    print(HEAD)
    with slow_disk(said.disk_rate) as more:
        for row in said.rows:
            for found in measure(said, row, more):
                every.append(found)
                print("\n".join(lines(found)), flush=True)
                write()
    for line in bound_lines(every):
        print(line)
    write()
    if said.plot:
        said.plot.write_text(picture(said, every))


if __name__ == "__main__":
    main()
