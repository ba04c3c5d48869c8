"""Memory and time of a step on one long sequence, by what is done with activations::

    python -m benchmarks.activations --path /mnt/nvme --tokens 32768 --window 1024
    python -m benchmarks.activations --path /mnt/nvme --tokens 32768 --layers 2 --ways checkpointing activations

Each way is a process of its own, in turns. All have the same paged model in bf16 behind activation checkpoints: as it
is (*checkpointing*), with tiled logits (*logits*, ``F.linear_cross_entropy``), with activations on NVMe
(*activations*), with both, and with the perceptron in tiles of the sequence, too (*all*). Ratios are against the first
way. Each warms up with a short sequence, from which the engine learns the order of uses. With ``--window`` tokens
attend to those of their window alone. That leaves most of the arithmetic of a long sequence out and none of its memory,
so transfers weigh more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.side import SAME, WAYS
from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.runner import ROOT, end_with_children, environment
from deepoffload.config.units import parse_bytes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.activations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", required=True, help="directory on the disk for swap files")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--layers", type=int, help="fewer than the size has")
    parser.add_argument("--tokens", type=int, default=32768, help="of the one sequence")
    parser.add_argument("--window", type=int, default=0, help="tokens that attend to each other; 0: all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--host-budget", type=parse_bytes, default=512 << 20, help="of the model and its activations")
    parser.add_argument("--activation-budget", type=parse_bytes, default=192 << 20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="measured ones of each round, after one that warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    return parser.parse_args()


def run(said: argparse.Namespace, way: str) -> dict[str, Any]:
    """What the process of one way says: losses, seconds and peaks of its steps, a sum of its weights."""
    names = ("path", "size", "layers", "tokens", "window", "host_budget", "activation_budget", "steps", "threads")
    spec = {name: getattr(said, name) for name in names} | {"way": way}
    command = [sys.executable, "-m", "benchmarks.activations.side", json.dumps(spec)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(said.threads), cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"the process of {way} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines(every: list[dict[str, Any]]) -> list[str]:
    """For people: each way, and its ratios to the first."""
    of: dict[str, list[dict[str, Any]]] = {}
    for found in every:
        of.setdefault(found["way"], []).append(found)
    peaks = {way: max(found["peak_bytes"] for found in runs) for way, runs in of.items()}
    seconds = {way: statistics.median(s for found in runs for s in found["seconds"]) for way, runs in of.items()}
    first = next(iter(of))
    text = [f"{'':14} {'peak GB':>8} {'of first':>8} {'step s':>8} {'of first':>8} {'moved GB':>8}"]
    for way, runs in of.items():
        moved = max(found["activation_bytes"] for found in runs)
        text.append(
            f"{way:14} {peaks[way] / 1e9:8.2f} {peaks[way] / peaks[first]:8.2f} {seconds[way]:8.1f} "
            f"{seconds[way] / seconds[first]:8.2f} {moved / 1e9:8.2f}"
        )
    for way, other in SAME.items():
        if way in of and other in of:
            runs = of[way] + of[other]
            names = [name for name in ("losses", "gradients") if all(run[name] == runs[0][name] for run in runs)]
            text.append(f"{way} and {other}: bits are equal of {' and '.join(names) or 'NOTHING'}")
    return text


def main() -> None:
    end_with_children()
    said = arguments()
    every: list[dict[str, Any]] = []
    for _ in range(said.rounds):
        for way in said.ways:
            every.append(run(said, way))
            if said.json:  # what was measured stays when a later one fails
                kept = vars(said) | {"json": str(said.json), "load": os.getloadavg()[0], "torch": torch.__version__}
                said.json.write_text(json.dumps({"arguments": kept, "runs": every}, indent=1) + "\n")
    print("\n".join(lines(every)))


if __name__ == "__main__":
    main()
