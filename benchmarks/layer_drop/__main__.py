"""What a step costs when layers are left out of it, as progressive layer drop does::

    python -m benchmarks.layer_drop --path /mnt/nvme --host-budget 1GiB --theta 0.5

A paged model makes some steps with all of its layers. Then it makes steps in each of which layer ``i`` of ``n`` runs
with probability ``1 - i / n * (1 - theta)``, drawn in each step. Their time should be at most 1.05 x (layers that run)
x (time per layer), which is the time of a whole step by its layers. Embedding, head and loss run in every step, so the
report has the same without them, too: their time is measured in steps that leave out every layer. Bytes are those of
the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import deepoffload
from benchmarks.common.gpt import GPT, SHAPES, fill, tokens_of
from deepoffload.config.units import parse_bytes

GOAL = 1.05
WARM_UP = 4
"""Steps from which the engine learns the order of uses."""


class Dropping(GPT):
    """Runs the layers whose numbers are in ``running``."""

    running: frozenset[int] = frozenset()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            if number in self.running:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Run:
    """A paged model in training."""

    def __init__(self, said: argparse.Namespace) -> None:
        with deepoffload.offload_context(
            nvme_path=said.path, host_budget=said.host_budget, precision="bf16", step_overlap=said.step_overlap
        ):
            self.model = Dropping(SHAPES[said.size], said.seq)
            fill(self.model)
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-4)
        self.batch, self.seq = said.batch, said.seq
        self.number = 0

    def steps(self, which: list[frozenset[int]]) -> dict[str, Any]:
        """Seconds of each step, and what all of them have cost."""
        before, seconds = deepoffload.stats(self.model), []
        for running in which:
            self.model.running = running
            begin_s = time.perf_counter()
            self.model(*tokens_of(self.number, self.batch, self.seq)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin_s)
            self.number += 1
        after = deepoffload.stats(self.model)
        names = ("faults", "order_mismatches", "disk_bytes_read", "disk_bytes_written")
        return {"seconds": seconds, **{name: after[name] - before[name] for name in names}}


def drawn(steps: int, layers: int, theta: float) -> list[frozenset[int]]:
    generator = torch.Generator().manual_seed(1)
    chances = [1 - number / layers * (1 - theta) for number in range(layers)]
    return [
        frozenset(n for n, chance in enumerate(chances) if torch.rand((), generator=generator) < chance)
        for _ in range(steps)
    ]


def measure(said: argparse.Namespace) -> dict[str, Any]:
    run, layers = Run(said), SHAPES[said.size].layers
    every = frozenset(range(layers))
    run.steps([every] * WARM_UP)
    whole = run.steps([every] * said.steps)
    which = drawn(WARM_UP + 2 * said.steps, layers, said.theta)
    run.steps(which[:WARM_UP])
    some = run.steps(which[WARM_UP:])
    run.steps([frozenset()] * WARM_UP)
    none = run.steps([frozenset()] * said.steps)
    ran = [len(running) for running in which[WARM_UP:]]
    whole_s, none_s = statistics.median(whole["seconds"]), statistics.median(none["seconds"])
    share = statistics.mean(ran) / layers
    took_s = statistics.mean(some["seconds"])

    def moved(found: dict[str, Any]) -> float:
        return float(found["disk_bytes_read"] + found["disk_bytes_written"]) / len(found["seconds"])

    return {
        "layers": layers,
        "share_of_layers": share,
        "whole_s": whole_s,
        "none_s": none_s,
        "dropping_s": took_s,
        "over_bound": took_s / (share * whole_s),
        "over_bound_of_layers": took_s / (none_s + share * (whole_s - none_s)),
        "share_of_bytes": moved(some) / moved(whole) if moved(whole) else None,
        "faults_per_left_out": some["faults"] / max(1, layers * len(ran) - sum(ran)),
        "whole": whole,
        "dropping": some,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_drop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", required=True, help="directory on the disk for swap files")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--host-budget", type=parse_bytes, default=1 << 30)
    parser.add_argument("--step-overlap", choices=("deferred", "speculative", "none"), default="deferred")
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="whole ones; of those that leave layers out twice as many")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    said = parser.parse_args()
    found = measure(said)
    print(
        f"{found['layers']} layers, {found['share_of_layers']:.2f} of them run: {found['dropping_s']:.3f} s per step, "
        f"whole {found['whole_s']:.3f} s, without layers {found['none_s']:.3f} s\n"
        f"over (layers that run) x (time per layer): {found['over_bound']:.2f} (goal {GOAL}); with what is in no layer "
        f"apart: {found['over_bound_of_layers']:.2f}\n"
        f"share of bytes: {found['share_of_bytes']}; faults per layer left out: {found['faults_per_left_out']:.2f}"
    )
    if said.json:
        arguments = {**vars(said), "json": str(said.json), "torch": torch.__version__}
        said.json.write_text(json.dumps({"arguments": arguments, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
