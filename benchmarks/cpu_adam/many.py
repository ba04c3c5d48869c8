"""What one step costs with many small parameters, where calls take the time and not memory.

    python -m benchmarks.cpu_adam.many

CPUAdamW, torch.optim.AdamW (fused and foreach) and, where it is installed, DeepSpeedCPUAdam step as many fp32
parameters, in interleaved rounds; gradients are new tensors in each round, as after zero_grad(). Times are CPU time on
one thread. A ratio is the median of the rounds' ratios. The JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepoffload
from benchmarks.cpu_adam.machine import RESULTS, machine

CASES = ((1, 1024), (10, 1024), (1000, 64), (400, 1024), (1000, 1024), (4000, 16), (100, 65536), (20, 1 << 20))
"""Parameters, and elements of each."""

OURS = "CPUAdamW"


def optimizers(count: int, numel: int) -> dict[str, torch.optim.Optimizer]:
    def params() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.randn(numel)) for _ in range(count)]

    found: dict[str, torch.optim.Optimizer] = {
        OURS: deepoffload.CPUAdamW(params(), lr=1e-5),
        "torch fused": torch.optim.AdamW(params(), lr=1e-5, fused=True),
        "torch foreach": torch.optim.AdamW(params(), lr=1e-5, foreach=True),
    }
    if importlib.util.find_spec("deepspeed"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam(params(), lr=1e-5)
    return found


def seconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def measure(count: int, numel: int, rounds: int) -> dict[str, list[float]]:
    entries = optimizers(count, numel)
    names = list(entries)
    found: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 2):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            for param in entries[name].param_groups[0]["params"]:
                param.grad = torch.full((numel,), 1e-3)
            elapsed = seconds(entries[name].step)
            if index > 1:
                found[name].append(elapsed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_adam_many.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for count, numel in CASES:
        found = measure(count, numel, options.rounds)
        rows = {}
        for name, values in found.items():
            ratio = statistics.median([other / own for other, own in zip(values, found[OURS], strict=True)])
            rows[name] = {"median_us": statistics.median(values) * 1e6, "times_ours": ratio}
            print(f"{count:5d} x {numel:<8d} {name:18s} {rows[name]['median_us']:10.0f} us  {ratio:6.2f} of ours")
        cases.append({"parameters": count, "numel": numel, "threads": 1, "rows": rows})
    report = {"question": "one step of many small parameters", "machine": machine(), "cases": cases}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
