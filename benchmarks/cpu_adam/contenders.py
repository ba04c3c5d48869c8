"""Who updates the weights: our kernels, the memory stream in C, torch, DeepSpeed. All work on the same buffers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepoffload
from benchmarks.cpu_adam.buffers import Buffers
from benchmarks.cpu_adam.zero_parts import CLIP_NORM, LANDING, STEP, zero3_parts
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK, AdamHyper, DType, StateDType, StateLayout

HERE = Path(__file__).resolve().parent
HYPER = AdamHyper(lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=100)
STREAMS = ("stream", "stream_prefetch")
PARAMETER_NUMEL = 1 << 22
"""Elements per parameter where a contender works parameter by parameter: a 2048 x 2048 matrix."""

FP32 = "ours fp32"
MASTER, SPLIT = "ours, what follows the norm", "ours, what follows the norm, split state"
WITH_LANDING = "ours, the whole update"
ALL16 = "ours all bf16"
LANDINGS = ("ours landing, bf16 += bf16", "ours landing, bf16 = bf16", "ours landing, fp32 += bf16")
COPY = "copy past the caches"
COPY32 = "ours landing, fp32 = bf16"
PARTS = {count: f"ours landing, fp32 = mean of {count} bf16 parts" for count in (2, 4)}
ONE_BY_ONE = {count: f"{name}, one by one" for count, name in PARTS.items()}
OPTIMIZER = "ours CPUAdamW.step() fp32"
TORCH, TORCH16 = "torch fused fp32", "torch fused, all bf16"
DEEPSPEED, DEEPSPEED16 = "DeepSpeed fp32", "DeepSpeed all bf16"
ZERO3, ZERO3_STEP = "DeepSpeed ZeRO-3, its whole update", "DeepSpeed ZeRO-3, what follows the norm"


@dataclass(frozen=True)
class Contender:
    bytes_per_param: float
    run: Callable[[], Any]


def load_stream() -> ctypes.CDLL:
    """Compile stream.c for this machine. Torch is loaded by now, so the two share one OpenMP team."""
    library = Path(tempfile.mkdtemp()) / "stream.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CC", "gcc"), *flags, str(HERE / "stream.c"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def streams(b: Buffers, threads: int, library: ctypes.CDLL) -> dict[str, Contender]:
    arrays = (b.weight, b.exp_avg, b.exp_avg_sq, b.grad)
    arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in arrays), ctypes.c_size_t(b.n), threads]
    found = {
        "stream": Contender(28, lambda: library.adam_stream(*arguments)),
        "stream_prefetch": Contender(28, lambda: library.adam_stream_prefetch(*arguments)),
    }
    if b.n % 2048 == 0 and b.landed16.data_ptr() % 64 == b.grad16.data_ptr() % 64 == 0:
        copied = [ctypes.c_void_p(b.landed16.data_ptr()), ctypes.c_void_p(b.grad16.data_ptr())]
        found[COPY] = Contender(4, lambda: library.copy_stream(*copied, ctypes.c_size_t(b.n * 2), threads))
    return found


def optimizer_step(make: Any, state: tuple[Tensor, ...], step: Any, **settings: Any) -> Callable[[], Any]:
    """``step`` of an optimizer over weight, gradient, exp_avg and exp_avg_sq."""
    weight, grad, exp_avg, exp_avg_sq = state
    param = torch.nn.Parameter(weight)
    param.grad = grad
    optimizer = make([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay, **settings)
    optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step


def ours(b: Buffers, threads: int) -> dict[str, Contender]:
    def step(layout: StateLayout, states: StateDType = StateDType.FP32) -> Callable[[], None]:
        segments, hypers = [b.segment(layout, states)], [HYPER._replace(state_dtype=states)]
        return lambda: cpu_adam.adam_step(segments, hypers, layout, grad_factor=0.5, num_threads=threads)

    def landing(dst: Tensor, dtype: DType, accumulate: bool) -> Callable[[], tuple[int, bool]]:
        return lambda: cpu_adam.land(
            dst.data_ptr(),
            b.grad16.data_ptr(),
            b.n,
            dst_dtype=dtype,
            src_dtype=DType.BF16,
            accumulate=accumulate,
            num_threads=threads,
        )

    def landing_parts(count: int, at_once: int) -> Callable[[], None]:
        parts = [t.data_ptr() for t in (b.grad16, b.exp_avg16, b.exp_avg_sq16, b.bucket16)[:count]]

        def land() -> None:
            for first in range(0, count, at_once):
                cpu_adam.land_parts(
                    b.exp_avg.data_ptr(),
                    parts[first : first + at_once],
                    b.n,
                    dtype=DType.BF16,
                    scale=1 / count,
                    accumulate=first > 0,
                    num_threads=threads,
                )

        return land

    land_first = landing(b.landed16, DType.BF16, False)
    landed = [b.segment(StateLayout.MASTER)._replace(grad=b.landed16.data_ptr())]

    def with_landing() -> None:
        total, _ = land_first()
        factor = min(1.0, CLIP_NORM / (cpu_adam.norm_of(total) + 1e-6))
        cpu_adam.adam_step(landed, [HYPER], StateLayout.MASTER, grad_factor=factor, num_threads=threads)

    state = (b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
    return {
        FP32: Contender(28, step(StateLayout.FP32)),
        OPTIMIZER: Contender(28, optimizer_step(deepoffload.CPUAdamW, state, torch.tensor(99.0))),
        MASTER: Contender(28, step(StateLayout.MASTER)),
        WITH_LANDING: Contender(32, with_landing),
        SPLIT: Contender(26, step(StateLayout.SPLIT_BF16)),
        "ours bf16 weight and gradient, fp32 moments": Contender(22, step(StateLayout.BF16)),
        ALL16: Contender(14, step(StateLayout.BF16, StateDType.BF16)),
        "ours split state, 8-bit moments": Contender(
            14 + 16 / STATE_BLOCK, step(StateLayout.SPLIT_BF16, StateDType.EIGHT_BIT)
        ),
        LANDINGS[0]: Contender(6, landing(b.landed16, DType.BF16, True)),
        LANDINGS[1]: Contender(4, land_first),
        LANDINGS[2]: Contender(10, landing(b.exp_avg, DType.FP32, True)),
        COPY32: Contender(6, landing(b.exp_avg, DType.FP32, False)),
        **{name: Contender(4 + 2 * count, landing_parts(count, count)) for count, name in PARTS.items()},
        **{name: Contender(4 + 2 * count, landing_parts(count, 1)) for count, name in ONE_BY_ONE.items()},
    }


def of_torch(b: Buffers, slow: bool) -> dict[str, Contender]:
    state = (b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
    all16 = (b.weight16, b.grad16, b.exp_avg16, b.exp_avg_sq16)
    adamw, at = torch.optim.AdamW, torch.tensor(99.0)
    found = {
        TORCH: Contender(28, optimizer_step(adamw, state, at.clone(), fused=True)),
        TORCH16: Contender(14, optimizer_step(adamw, all16, at.clone(), fused=True)),
    }
    if slow:
        found["torch default fp32"] = Contender(28, optimizer_step(adamw, state, at.clone(), foreach=False))
    return found


def deepspeed(b: Buffers) -> dict[str, Contender]:
    """DeepSpeedCPUAdam, and what ZeRO-3 does around it with the optimizer on the CPU (zero_parts.py)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def adam(*state: Tensor, fp32_states: bool = True) -> Callable[[], Any]:
        return optimizer_step(DeepSpeedCPUAdam, state, 99, fp32_optimizer_states=fp32_states)

    step = adam(b.weight, b.grad, b.exp_avg, b.exp_avg_sq)
    parts = zero3_parts(b, PARAMETER_NUMEL, step)

    def run(names: tuple[str, ...]) -> Callable[[], None]:
        calls = [parts[name] for name in names]

        def run_all() -> None:
            for call in calls:
                call()

        return run_all

    mixed = (b.weight16, b.grad16, b.exp_avg, b.exp_avg_sq)
    all16 = (b.weight16, b.grad16, b.exp_avg16, b.exp_avg_sq16)
    return {
        DEEPSPEED: Contender(28, step),
        ZERO3: Contender(32, run((*LANDING, *STEP))),
        ZERO3_STEP: Contender(28, run(STEP)),
        "DeepSpeed bf16 weight and gradient, fp32 moments": Contender(22, adam(*mixed)),
        DEEPSPEED16: Contender(14, adam(*all16, fp32_states=False)),
    }


def contenders(b: Buffers, threads: int, library: ctypes.CDLL, peers: list[str]) -> dict[str, Contender]:
    found = {**streams(b, threads, library), **ours(b, threads)}
    if "torch" in peers:
        found.update(of_torch(b, "torch-slow" in peers))
    if "deepspeed" in peers:
        found.update(deepspeed(b))
    return found
