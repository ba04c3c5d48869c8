"""What a step costs when the update is made by a class of torch instead of one of our kernels.

    python -m benchmarks.cpu_adam.paged --nvme-path /mnt/nvme

A model of square matrices is trained by CPUAdamW, and by deepoffload.paged with torch's AdamW (fused, and its default),
with bf16 and fp32 weights: once with all state in memory, once with state on NVMe. Each has an engine of its own; steps
are made at once (step_overlap="none") and in interleaved rounds. Times are those of optimizer.step() alone. A ratio is
the median of the rounds' ratios over CPUAdamW. The JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepoffload
from benchmarks.cpu_adam.machine import RESULTS, machine

OURS = "CPUAdamW"
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    OURS: lambda params: deepoffload.CPUAdamW(params, lr=1e-5),
    "paged AdamW fused": lambda params: deepoffload.paged(torch.optim.AdamW, params, lr=1e-5, fused=True),
    "paged AdamW": lambda params: deepoffload.paged(torch.optim.AdamW, params, lr=1e-5),
}


def build(width: int, depth: int, budget_bytes: int, nvme_path: str, precision: str) -> nn.Module:
    with deepoffload.offload_context(
        host_budget=budget_bytes, nvme_path=nvme_path, step_overlap="none", precision=precision
    ):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])


def seconds_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> float:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, width, dtype=dtype)).float().square().mean().backward()
    started = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - started


def measure(options: argparse.Namespace, share: float, precision: str) -> dict[str, dict[str, float]]:
    """``share``: the budget as a part of what all bytes of training take."""
    numel = options.width * options.width * options.depth
    budget_bytes = int(numel * (4 + 4 + 8) * 1.2 * share)
    entries = {}
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as folder:
        for name, make in MAKERS.items():
            model = build(options.width, options.depth, budget_bytes, folder, precision)
            entries[name] = model, make(model.parameters())
        names = list(entries)
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds + 2):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                elapsed = seconds_of_step(*entries[name], options.width)
                if number > 1:
                    found[name].append(elapsed)
        del entries, model
    rows = {}
    for name, values in found.items():
        ratio = statistics.median(own / ours for own, ours in zip(values, found[OURS], strict=True))
        rows[name] = {"ns_per_parameter": statistics.median(values) * 1e9 / numel, "over_ours": ratio}
        print(f"  {name:20} {rows[name]['ns_per_parameter']:7.2f} ns per parameter  {ratio:5.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_adam_paged.json")
    options = parser.parse_args()
    cases = []
    for precision in ("keep", "bf16"):
        for place, share in (("memory", 1.0), ("nvme", 0.35)):
            print(f"{precision}, state in {place}")
            rows = measure(options, share, precision)
            cases.append({"precision": precision, "state": place, "rows": rows})
    options.out.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
