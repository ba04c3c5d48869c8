"""How close do the host kernels come to the memory's limit, and how do they compare with torch and DeepSpeed?

    python benchmarks/cpu_adam/run.py --sizes 64M --threads 1 2

Every round runs every contender once, in rotating order. A ratio is the median over the rounds of "bytes that the
algorithm must move, over time", divided by the better of two Adam-shaped streams in C (4 reads, 3 in-place writes) of
the same round. The JSON goes to benchmarks/results/. DeepSpeed takes part with --peers torch deepspeed when it is
installed (pip install deepspeed ninja). With --plot the time per parameter against size is drawn (needs matplotlib).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK, AdamHyper, DType, Segment, StateDType, StateLayout

HERE = Path(__file__).resolve().parent
HYPER = AdamHyper(lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=100)
STREAMS = ("stream", "stream_prefetch")
CLIP_NORM = 1.0
PARAMETER_NUMEL = 1 << 22
"""Elements per parameter where a contender works parameter by parameter: a 2048 x 2048 matrix."""


@dataclass(frozen=True)
class Contender:
    bytes_per_param: float
    run: Callable[[], Any]


def parse_size(text: str) -> int:
    factor = {"k": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return int(float(text.rstrip("kM")) * factor)


def load_stream() -> ctypes.CDLL:
    """Compile stream.c for this machine. Torch is loaded by now, so the two share one OpenMP team."""
    library = Path(tempfile.mkdtemp()) / "stream.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CC", "gcc"), *flags, str(HERE / "stream.c"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Buffers:
    """One set of streams that all contenders share; the moments stay as they are, for the steps are tiny."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.weight, self.grad = torch.randn(n), torch.randn(n).mul_(1e-3)
        self.exp_avg, self.exp_avg_sq = torch.randn(n).mul_(1e-4), torch.rand(n).mul_(1e-6)
        self.grad16, self.weight16 = self.grad.bfloat16(), self.weight.bfloat16()
        self.landed16, self.remainder = torch.zeros_like(self.grad16), torch.zeros(n, dtype=torch.int16)
        self.stream = [torch.ones(n) for _ in range(4)]
        self.exp_avg16, self.exp_avg_sq16 = self.exp_avg.bfloat16(), self.exp_avg_sq.bfloat16()
        self.codes = [torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)]
        self.scales = [torch.zeros(-(-n // STATE_BLOCK)) for _ in range(2)]

    def segment(self, layout: StateLayout, states: StateDType = StateDType.FP32) -> Segment:
        grad, grad_dtype = (self.grad, DType.FP32) if layout is StateLayout.FP32 else (self.grad16, DType.BF16)
        whole = layout is StateLayout.FP32
        first, second = {
            StateDType.FP32: (self.exp_avg, self.exp_avg_sq),
            StateDType.BF16: (self.exp_avg16, self.exp_avg_sq16),
            StateDType.EIGHT_BIT: self.codes,
        }[states]
        return Segment(
            numel=self.n,
            hyper_index=0,
            grad=grad.data_ptr(),
            grad_dtype=grad_dtype,
            weight=(self.weight if whole else self.weight16).data_ptr(),
            weight_dtype=DType.FP32 if whole else DType.BF16,
            remainder=self.remainder.data_ptr(),
            master=self.weight.data_ptr(),
            exp_avg=first.data_ptr(),
            exp_avg_sq=second.data_ptr(),
            exp_avg_absmax=self.scales[0].data_ptr(),
            exp_avg_sq_absmax=self.scales[1].data_ptr(),
        )


def ours(b: Buffers, threads: int) -> dict[str, Contender]:
    def step(layout: StateLayout, states: StateDType = StateDType.FP32) -> Callable[[], None]:
        segments, hypers = [b.segment(layout, states)], [replace(HYPER, state_dtype=states)]
        return lambda: cpu_adam.adam_step(segments, hypers, layout, grad_factor=0.5, num_threads=threads)

    def step_with_norm() -> None:
        """What a program does that has not landed its gradients: the landing pass would have summed the squares."""
        grad = b.grad16.data_ptr()
        total, _ = cpu_adam.sum_of_squares(grad, b.n, dtype=DType.BF16, num_threads=threads)
        factor = min(1.0, CLIP_NORM / (math.sqrt(total) + 1e-6))
        segments = [b.segment(StateLayout.MASTER)]
        cpu_adam.adam_step(segments, [HYPER], StateLayout.MASTER, grad_factor=factor, num_threads=threads)

    def landing(dst: torch.Tensor, dtype: DType, accumulate: bool) -> Callable[[], Any]:
        return lambda: cpu_adam.land(
            dst.data_ptr(),
            b.grad16.data_ptr(),
            b.n,
            dst_dtype=dtype,
            src_dtype=DType.BF16,
            accumulate=accumulate,
            num_threads=threads,
        )

    return {
        "ours fp32": Contender(28, step(StateLayout.FP32)),
        "ours bf16 gradient, fp32 master, bf16 weight": Contender(28, step(StateLayout.MASTER)),
        "ours the same after a pass for the norm": Contender(30, step_with_norm),
        "ours bf16 gradient, split state": Contender(26, step(StateLayout.SPLIT_BF16)),
        "ours bf16 weight and gradient, fp32 moments": Contender(22, step(StateLayout.BF16)),
        "ours all bf16": Contender(14, step(StateLayout.BF16, StateDType.BF16)),
        "ours split state, 8-bit moments": Contender(
            14 + 16 / STATE_BLOCK, step(StateLayout.SPLIT_BF16, StateDType.EIGHT_BIT)
        ),
        "ours landing, bf16 += bf16": Contender(6, landing(b.landed16, DType.BF16, True)),
        "ours landing, bf16 = bf16": Contender(4, landing(b.landed16, DType.BF16, False)),
        "ours landing, fp32 += bf16": Contender(10, landing(b.stream[3], DType.FP32, True)),
    }


def torch_adamw(
    weight: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, **kind: bool
) -> Callable[[], Any]:
    param = torch.nn.Parameter(weight)
    param.grad = grad
    optimizer = torch.optim.AdamW([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay, **kind)
    optimizer.state[param] = {"step": torch.tensor(99.0), "exp_avg": m, "exp_avg_sq": v}
    return optimizer.step


def deepspeed_contenders(b: Buffers) -> dict[str, Contender]:
    """DeepSpeedCPUAdam, and what ZeRO-3 does around it with the optimizer on the CPU (0.19.8, runtime/zero/stage3.py).

    For each parameter ``_offload_grad_partition_at_boundary``: its norm in double (``_constant_buffered_norm2``), and
    its gradient to fp32, copied into the flat fp32 gradient. Then ``step``: ``unscale_and_clip_grads`` multiplies that
    one, ``_optimizer_step`` runs Adam on the flat master, and ``_reassign_or_swap_out_partitioned_parameters`` copies
    it to the bf16 weights. Left out, though it does that too: the copy of autograd's gradients that comes before.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def adam(weight: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
        param = torch.nn.Parameter(weight)
        param.grad = grad
        fp32_states = m.dtype is torch.float32
        optimizer = DeepSpeedCPUAdam(
            [param], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fp32_optimizer_states=fp32_states
        )
        optimizer.state[param] = {"step": 99, "exp_avg": m, "exp_avg_sq": v}
        return optimizer.step

    step = adam(b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
    parts = list(zip(b.grad16.split(PARAMETER_NUMEL), b.grad.split(PARAMETER_NUMEL), strict=True))

    def sequence(with_norm: bool) -> None:
        total = torch.zeros((), dtype=torch.double)
        for grad16, grad in parts:
            if with_norm:
                norm = (grad16.data.to(torch.double).norm(2) ** 2.0) ** 0.5
                total += norm**2
            grad.copy_(grad16.to(dtype=torch.float32))
        clip = torch.clamp((total.sqrt() + 1e-6) / CLIP_NORM, min=1.0)
        b.grad.mul_(1.0 / clip)
        step()
        b.weight16.data.copy_(b.weight.data)

    return {
        "DeepSpeed fp32": Contender(28, step),
        "DeepSpeed ZeRO-3 update, norm known": Contender(28, lambda: sequence(False)),
        "DeepSpeed ZeRO-3 update": Contender(30, lambda: sequence(True)),
        "DeepSpeed bf16 weight and gradient, fp32 moments": Contender(
            22, adam(b.weight16, b.grad16, b.exp_avg, b.exp_avg_sq)
        ),
        "DeepSpeed all bf16": Contender(14, adam(b.weight16, b.grad16, b.exp_avg16, b.exp_avg_sq16)),
    }


def contenders(b: Buffers, threads: int, stream: ctypes.CDLL, peers: list[str]) -> dict[str, Contender]:
    arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in b.stream), ctypes.c_size_t(b.n), threads]
    found = {
        "stream": Contender(28, lambda: stream.adam_stream(*arguments)),
        "stream_prefetch": Contender(28, lambda: stream.adam_stream_prefetch(*arguments)),
        **ours(b, threads),
    }
    state = (b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
    if "torch" in peers:
        found["torch fused fp32"] = Contender(28, torch_adamw(*state, fused=True))
        all16 = (b.weight16, b.grad16, b.exp_avg16, b.exp_avg_sq16)
        found["torch fused, all bf16"] = Contender(14, torch_adamw(*all16, fused=True))
    if "torch-slow" in peers:
        found["torch default fp32"] = Contender(28, torch_adamw(*state, foreach=False))
    if "deepspeed" in peers:
        found.update(deepspeed_contenders(b))
    return found


def measure(entries: dict[str, Contender], n: int, rounds: int) -> dict[str, dict[str, float]]:
    names = list(entries)
    repeats = max(1, (1 << 22) // n)  # small sizes: enough calls to be above the clock's grain
    gbs: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds + 1):
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            started = time.perf_counter()
            for _ in range(repeats):
                entries[name].run()
            elapsed = (time.perf_counter() - started) / repeats
            if round_index > 0:  # the first round pages everything in
                gbs[name].append(entries[name].bytes_per_param * n / elapsed / 1e9)
    limits = [max(pair) for pair in zip(*(gbs[name] for name in STREAMS), strict=True)]
    return {
        name: {
            "bytes_per_param": entries[name].bytes_per_param,
            "median_gb_s": statistics.median(values),
            "min_gb_s": min(values),
            "max_gb_s": max(values),
            "ns_per_param": entries[name].bytes_per_param / statistics.median(values),
            "ratio_to_limit": statistics.median([value / limit for value, limit in zip(values, limits, strict=True)]),
        }
        for name, values in gbs.items()
    }


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))}
    return {
        "cpu": sorted(names),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_before": os.getloadavg(),
        "scheduler": {0: "other", 1: "fifo", 2: "round robin"}.get(os.sched_getscheduler(0), "unknown"),
        "torch": torch.__version__,
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
        "capability": cpu_adam.capability(),
        "threads_from": cpu_adam.threading_backend(),
    }


def show(result: dict[str, dict[str, float]], n: int, threads: int) -> None:
    print(f"\n{n:,} parameters, {threads} thread(s)\n{'':50s} B/param     GB/s    ns/param  of the limit")
    for name, row in result.items():
        print(
            f"{name:50s} {row['bytes_per_param']:7.0f} {row['median_gb_s']:8.1f} {row['ns_per_param']:11.3f}"
            f" {row['ratio_to_limit']:13.2f}"
        )


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(run["threads"] for run in runs)
    chosen = sorted((run for run in runs if run["threads"] == threads), key=lambda run: run["parameters"])
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in chosen[0]["rows"]:
        if "landing" in name or name == "stream_prefetch":
            continue
        rows = [(run["parameters"], run["rows"][name]["ns_per_param"]) for run in chosen]
        style = "k--" if name == "stream" else "o-"
        axes.plot([n for n, _ in rows], [ns for _, ns in rows], style, label=name, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ns per parameter", title=f"{threads} thread(s)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["64M"], help="parameters, such as 1k 1M 256M")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="*", default=["torch"], choices=["torch", "torch-slow", "deepspeed"])
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "cpu_adam.json")
    options = parser.parse_args()
    stream, runs = load_stream(), []
    report = {"question": "host kernels against the memory's limit", "machine": machine(), "runs": runs}
    for n in map(parse_size, options.sizes):
        buffers = Buffers(n)
        for threads in options.threads:
            torch.set_num_threads(threads)
            rows = measure(contenders(buffers, threads, stream, options.peers), n, options.rounds)
            runs.append({"parameters": n, "threads": threads, "rounds": options.rounds, "rows": rows})
            show(rows, n, threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(runs, options.out.with_suffix(".png"))
    print(f"\nwritten: {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
