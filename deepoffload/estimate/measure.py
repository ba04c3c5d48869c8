"""This machine, measured: disk, memory, process, and the operators of a model at their own shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from deepoffload import machine as limits
from deepoffload.estimate.dry_run import DryRun, Op, Shape
from deepoffload.estimate.machine import MachineSpec
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import measure_bandwidth
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdamHyper, DType, Segment, StateLayout

STREAM_NUMEL = 1 << 24
"""Elements of the update that is timed: 470 MB are touched, more than any cache holds."""
COLD_BYTES = 96 << 20
"""An operator's inputs are rotated through about so much memory, because a model's are not in the cache either."""
COPIES_MAX = 16
REPEATS = 5

_PROCESS = """
import torch, torch._dynamo, deepoffload
from deepoffload.optim.adam import CPUAdamW
from deepoffload.runtime.context import offload_context
layer = torch.nn.Linear(64, 64)
for dtype in (torch.float32, torch.bfloat16):
    layer.to(dtype)(torch.randn(8, 64).to(dtype)).sum().backward()
with open("/proc/self/status") as status:
    fields = dict(line.split(":", 1) for line in status if ":" in line)
print((int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024)
"""


def measure_machine(nvme_path: str | None = None, *, fresh: bool = True) -> MachineSpec:
    """Memory, update bandwidth, matrix products and (with a path) disk of this machine; takes some seconds.

    Args:
        fresh: measure the disk now, instead of taking what the engine has measured in the last 30 days.

    Raises:
        ConfigError: the path is missing or not writable.
    """
    found = limits.measure([nvme_path] if nvme_path else [])
    spec = MachineSpec(
        name=os.uname().nodename,
        flops_per_s=_matmul_rate(torch.bfloat16),
        device_bytes_per_s=_copy_rate(),
        host_memory_bytes=found.memory_available_bytes,
        host_bytes_per_s=update_rate(),
        process_bytes=process_bytes(),
    )
    if nvme_path is None:
        return spec
    with IoEngine() as engine:
        disk = measure_bandwidth(nvme_path, engine, use_cache=not fresh)
    return replace(
        spec,
        nvme_bytes=sum(disk.free_bytes for disk in found.disks),
        nvme_read_bytes_per_s=disk.read_bytes_per_s,
        nvme_write_bytes_per_s=disk.write_bytes_per_s,
        nvme_mixed_bytes_per_s=disk.mixed_bytes_per_s,
    )


def process_bytes() -> int:
    """Memory (RssAnon + RssShmem) of a fresh process that has loaded torch and deepoffload and run an operator."""
    # Hooks and checkpointing are kept out of torch.compile, for which torch loads its compiler's front end.
    done = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True)
    return int(done.stdout)


def update_rate() -> float:
    """Bytes per second that the host update of bf16 weights touches (28 per parameter)."""
    n, threads = STREAM_NUMEL, torch.get_num_threads()
    weight, grad = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    remainder = torch.zeros(n, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    segment = Segment(
        numel=n,
        hyper_index=0,
        grad=grad.data_ptr(),
        grad_dtype=DType.BF16,
        weight=weight.data_ptr(),
        weight_dtype=DType.BF16,
        remainder=remainder.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
    )
    hyper = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True, step=1)

    def update() -> None:
        cpu_adam.adam_step([segment], [hyper], StateLayout.SPLIT_BF16, grad_factor=1.0, num_threads=threads)

    return n * UPDATE_TOUCHES / _seconds(update)


UPDATE_TOUCHES = 26
"""Bytes that the update of one bf16 parameter reads and writes: weight, remainder and two moments, and the gradient."""


def _matmul_rate(dtype: torch.dtype, tokens: int = 256, width: int = 1024) -> float:
    left, right = torch.ones(tokens, width, dtype=dtype), torch.ones(width, 4 * width, dtype=dtype)
    return 2 * tokens * width * 4 * width / _seconds(lambda: torch.mm(left, right))


def _copy_rate() -> float:
    source = torch.zeros(32 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _seconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def measure_ops(run: DryRun) -> dict[Op, float]:
    """Seconds of each kernel call of a dry run, repeated with real tensors of the same shapes, strides and types.

    Calls that cannot be repeated alone (they need values, not shapes) are left out.
    """
    measured: dict[Op, float] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for op, (func, args, kwargs) in run.calls.items():
            try:
                measured[op] = _op_seconds(func, args, kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
    return measured


def _op_seconds(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    shapes = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Shape)]
    size = sum(torch.Size(shape.shape).numel() * shape.dtype.itemsize for shape in shapes)
    copies = max(1, min(COPIES_MAX, COLD_BYTES // max(size, 1)))
    inputs = [tree_map(_filled, (args, dict(kwargs))) for _ in range(copies)]
    func(*inputs[0][0], **inputs[0][1])
    times = []
    for turn in range(max(REPEATS, copies)):
        mine, named = inputs[turn % copies]
        begun = time.perf_counter()
        func(*mine, **named)
        times.append(time.perf_counter() - begun)
    return min(times)


def _filled(value: Any) -> Any:
    if not isinstance(value, Shape):
        return value
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    if 0 in value.stride:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return tensor.normal_() if value.dtype.is_floating_point else tensor.zero_()
