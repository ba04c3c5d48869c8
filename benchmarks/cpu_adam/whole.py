"""The whole host update, from autograd's bf16 gradients to the bf16 weights, next to DeepSpeed's own engine.

    pip install -e ".[bench-peers]"
    python -m benchmarks.cpu_adam.whole

Work of all: fp32 masters and moments, gradients clipped to a global norm of 1. In each round, in rotating order, each
gets new gradients, a tensor for each parameter; then "landing" is what it does with them inside backward (ours: one
pass per parameter that copies and sums squares; DeepSpeed's gradient hooks and the end of its backward), "step" is the
rest. Then each of the parts of ZeRO-3 (zero_parts.py) runs alone, on buffers on huge pages, which DeepSpeed's own are
not. A ratio is the median of the rounds' ratios. The JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.cpu_adam.buffers import Buffers
from benchmarks.cpu_adam.contenders import HYPER, optimizer_step
from benchmarks.cpu_adam.machine import RESULTS, machine, parse_size
from benchmarks.cpu_adam.zero_parts import CLIP_NORM, LANDING, zero3_parts
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, StateLayout

OURS, OURS_SPLIT = "ours, fp32 master", "ours, split master"


class Contender(Protocol):
    def prepare(self, grads: list[Tensor]) -> None: ...
    def land(self) -> None: ...
    def step(self) -> None: ...


class Ours:
    """The passes that the engine makes, with a segment for each parameter."""

    def __init__(self, b: Buffers, layout: StateLayout, parameter_numel: int, threads: int) -> None:
        whole, size = b.segment(layout), parameter_numel
        self.layout, self.threads, self.numel = layout, threads, parameter_numel
        self.segments = [
            whole._replace(
                numel=size,
                grad=b.landed16.data_ptr() + 2 * i,
                weight=whole.weight + 2 * i,
                remainder=whole.remainder + 2 * i,
                master=whole.master + 4 * i,
                exp_avg=whole.exp_avg + 4 * i,
                exp_avg_sq=whole.exp_avg_sq + 4 * i,
            )
            for i in range(0, b.n, size)
        ]
        self.grads: list[Tensor] = []
        self.factor = 1.0

    def prepare(self, grads: list[Tensor]) -> None:
        self.grads = list(grads)

    def land(self) -> None:
        total, bf16, number = 0, DType.BF16, len(self.grads)
        for segment in reversed(self.segments):
            number -= 1
            grad = self.grads.pop()
            squares, _ = cpu_adam.land(
                segment.grad,
                grad.data_ptr(),
                self.numel,
                dst_dtype=bf16,
                src_dtype=bf16,
                accumulate=False,
                num_threads=self.threads,
            )
            total += squares
            del grad
        self.factor = min(1.0, CLIP_NORM / (cpu_adam.norm_of(total) + 1e-6))

    def step(self) -> None:
        cpu_adam.adam_step(self.segments, [HYPER], self.layout, grad_factor=self.factor, num_threads=self.threads)


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(
    contenders: dict[str, Contender], parts: dict[str, Any], shapes: list[tuple[int, int]], rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[float]]]:
    """Seconds of landing and step of each contender, and of each part, in each round."""
    names = list(contenders)
    whole: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    alone: dict[str, list[float]] = {name: [] for name in parts}
    for index in range(rounds + 2):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            one = contenders[name]
            one.prepare([torch.full(shape, 1e-4, dtype=torch.bfloat16) for shape in shapes])
            seconds = timed(one.land), timed(one.step)
            if index > 1:  # the first rounds page everything in
                whole[name].append(seconds)
        for name, part in parts.items():
            elapsed = timed(part)
            if index > 1:
                alone[name].append(elapsed)
    return whole, alone


def summary(whole: dict[str, list[tuple[float, float]]], alone: dict[str, list[float]], n: int) -> dict[str, Any]:
    per_param = 1e9 / n
    rows = {}
    for name, values in whole.items():
        totals = [sum(pair) / sum(own) for pair, own in zip(values, whole[OURS], strict=True)]
        steps = [pair[1] / own[1] for pair, own in zip(values, whole[OURS], strict=True)]
        rows[name] = {
            "landing_ns": statistics.median(landing for landing, _ in values) * per_param,
            "step_ns": statistics.median(step for _, step in values) * per_param,
            "times_ours": statistics.median(totals),
            "step_times_ours": statistics.median(steps),
            "rounds_s": values,
        }
    parts = {name: statistics.median(values) * per_param for name, values in alone.items()}
    return {"rows": rows, "parts_ns": parts}


def show(found: dict[str, Any]) -> None:
    size = f"{found['parameters']:,} parameters in matrices of {found['matrix']} x {found['matrix']}"
    print(f"\n{size}, {found['threads']} thread(s)\n{'ns per parameter':22s} landing    step     all   over ours")
    for name, row in found["rows"].items():
        landing, step = row["landing_ns"], row["step_ns"]
        print(f"{name:22s} {landing:7.2f} {step:7.2f} {landing + step:7.2f} {row['times_ours']:9.2f}")
    print("parts of ZeRO-3, alone:")
    for name, value in found["parts_ns"].items():
        print(f"  {'landing' if name in LANDING else 'step':8s} {name:28s} {value:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="64M", help="parameters")
    parser.add_argument("--matrices", nargs="+", type=int, default=[2048, 4096], help="rows and columns of each")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_adam_whole.json")
    options = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        parser.error("DeepSpeed, which this compares with, is not installed: pip install -e '.[bench-peers]'")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from benchmarks.cpu_adam.zero import Zero, start

    n, runs = parse_size(options.size), []
    start()
    for side in options.matrices:
        shapes = [(side, side)] * (n // (side * side))
        b = Buffers(n, huge_pages=True)
        zeros = {f"DeepSpeed ZeRO-{stage}": Zero(stage, shapes, HYPER.lr, CLIP_NORM) for stage in (3, 2)}
        state = (b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
        parts = zero3_parts(b, side * side, optimizer_step(DeepSpeedCPUAdam, state, 99))
        for threads in options.threads:
            torch.set_num_threads(threads)
            layouts = {OURS: StateLayout.MASTER, OURS_SPLIT: StateLayout.SPLIT_BF16}
            ours = {name: Ours(b, layout, side * side, threads) for name, layout in layouts.items()}
            found = summary(*measure({**ours, **zeros}, parts, shapes, options.rounds), n)
            runs.append({"parameters": n, "matrix": side, "threads": threads, "rounds": options.rounds, **found})
            show(runs[-1])
        for zero in zeros.values():
            zero.close()
        del b, state, parts, ours, zeros
    report = {"question": "the whole host update next to DeepSpeed's engine", "machine": machine(), "runs": runs}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
