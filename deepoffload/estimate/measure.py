"""This machine, measured: disk, memory, process, and the operators of a model at their own shapes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepoffload import machine as limits
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.overheads import measure_overheads
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.recording import DryRun, Op, Shape
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import measure_bandwidth
from deepoffload.io.swap_files import check_paths
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.native import cpu_adam
from deepoffload.native.aio import HostMapping
from deepoffload.native.cpu_adam import AdamHyper, DType, Segment, StateLayout
from deepoffload.params.torch_private import tree_flatten, tree_map
from deepoffload.ranks.link_rate import median_seconds

STREAM_NUMEL = 1 << 24
"""Elements of the update that is timed: 436 MB are touched, more than any cache holds."""
COLD_BYTES = 96 << 20
"""An operator's inputs are not in the caches when it is called: between two of its calls others go through as much."""
REPEATS, ROUNDS = 9, 15
VALUES_STD = 0.02
DISK_TIME_S = 2.0
SHARE_REQUEST_BYTES, SHARE_BATCH = 8 << 20, 48

COMPILER = "torch._dynamo"
"""torch loads its compiler's front end when it checkpoints activations, and so do libraries such as transformers."""

_PROCESS = """
import contextlib, importlib, sys
import torch, deepoffload
from deepoffload.optim.adam import CPUAdamW
from deepoffload.runtime.context import offload_context
layer = torch.nn.Linear(64, 64)
for dtype in (torch.float32, torch.bfloat16):
    layer.to(dtype)(torch.randn(8, 64).to(dtype)).sum().backward()
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with open("/proc/self/status") as status:
    fields = dict(line.split(":", 1) for line in status if ":" in line)
print((int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024)
"""


def unmeasured_machine(nvme_path: str | None = None) -> MachineSpec:
    """Memory and disk space of this machine, which need no measuring, and usual rates.

    Raises:
        ConfigError: the path is missing, is no directory, or cannot be written to.
    """
    found = limits.measure([] if nvme_path is None else check_paths(nvme_path, "--measure"))
    return MachineSpec(
        name=os.uname().nodename,
        host_memory_bytes=found.memory_available_bytes,
        nvme_bytes=sum(disk.free_bytes for disk in found.disks),
    )


def measure_machine(
    nvme_path: str | None = None,
    *,
    fresh: bool = True,
    libraries: Sequence[str] = (COMPILER,),
    progress: Report = silent,
) -> MachineSpec:
    """Memory, rates, fixed costs and (with a path) disk of this machine; takes some seconds.

    Args:
        fresh: measure the disk now, instead of taking what the engine has measured in the last 30 days.
        libraries: as of :func:`process_bytes`.

    Raises:
        ConfigError: the path is missing or not writable.
    """
    spec = unmeasured_machine(nvme_path)
    progress("memory of a process")
    spec = replace(spec, process_bytes=process_bytes(libraries))
    return measure_rates(spec, nvme_path, fresh=fresh, progress=progress)


def measure_rates(
    spec: MachineSpec, nvme_path: str | None = None, *, fresh: bool = True, progress: Report = silent
) -> MachineSpec:
    """``spec`` with what this machine's processor, memory and disk give now.

    Arguments as of :func:`measure_machine`.
    """
    spec = measure_processor(spec, nvme_path, progress)
    return spec if nvme_path is None else measure_disk(spec, nvme_path, progress, fresh=fresh)


def measure_processor(
    spec: MachineSpec,
    nvme_path: str | None = None,
    progress: Report = silent,
    meet: Callable[[], object] = lambda: None,
) -> MachineSpec:
    """``spec`` with the rates of processor and memory, and the fixed costs of a step.

    ``meet``: waits for the other ranks of this host. A rank whose neighbours use the memory, too, gets less of it.
    """
    progress("fixed costs of a step")
    fixed = measure_overheads(nvme_path)
    progress("processor and memory")
    return replace(
        spec,
        flops_per_s=_matmul_rate(torch.bfloat16, meet),
        device_bytes_per_s=_copy_rate(meet),
        host_bytes_per_s=update_rate(meet),
        visit_overhead_s=fixed.visit_s,
        landing_overhead_s=fixed.landing_s,
        piece_overhead_s=fixed.piece_s,
        plan_overhead_s=fixed.plan_s,
    )


def measure_disk(spec: MachineSpec, nvme_path: str, progress: Report = silent, *, fresh: bool = True) -> MachineSpec:
    """``spec`` with the rates of the disk."""
    progress(f"disk at {nvme_path}")
    with IoEngine() as engine:
        disk = measure_bandwidth(nvme_path, engine, use_cache=not fresh, time_s=DISK_TIME_S, key="--measure")
        share = disk_share_while_computing(nvme_path, engine)
    return replace(
        spec,
        nvme_read_bytes_per_s=disk.read_bytes_per_s,
        nvme_write_bytes_per_s=disk.write_bytes_per_s,
        nvme_mixed_bytes_per_s=disk.mixed_bytes_per_s,
        nvme_share_while_computing=share,
    )


def disk_share_while_computing(path: str, engine: IoEngine) -> float:
    """What is left of the disk's rate while all cores compute: requests are handed to it by the same cores.

    Raises:
        BudgetError: no room at ``path``.
    """
    left, right = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(1024, 4096, dtype=torch.bfloat16)

    def compute(tickets: list[Ticket]) -> None:
        while not tickets[-1].done():
            torch.mm(left, right)

    half = SHARE_BATCH // 2
    with (
        HostMapping(SHARE_REQUEST_BYTES * SHARE_BATCH) as memory,
        SwapSpace(
            engine, [path], budget_bytes=SHARE_REQUEST_BYTES * SHARE_BATCH, label="measure", key="--measure"
        ) as swap,
    ):
        swap.reserve(SHARE_REQUEST_BYTES * SHARE_BATCH)
        extents = [swap.allocate(SHARE_REQUEST_BYTES) for _ in range(SHARE_BATCH)]
        addresses = [memory.address + number * SHARE_REQUEST_BYTES for number in range(SHARE_BATCH)]

        def seconds(meanwhile: Callable[[list[Ticket]], None]) -> float:
            begun = time.perf_counter()
            writes = [swap.write(e, a) for e, a in zip(extents[:half], addresses[:half], strict=True)]
            reads = [swap.read(e, a) for e, a in zip(extents[half:], addresses[half:], strict=True)]
            meanwhile(writes)
            meanwhile(reads)
            for ticket in (*writes, *reads):
                ticket.wait()
            return time.perf_counter() - begun

        for extent, address in zip(extents, addresses, strict=True):
            swap.write(extent, address).wait()
        idle = statistics.median(seconds(lambda tickets: None) for _ in range(REPEATS))
        computing = statistics.median(seconds(compute) for _ in range(REPEATS))
    return min(1.0, idle / computing)


def process_bytes(libraries: Sequence[str] = (COMPILER,)) -> int:
    """Memory (RssAnon + RssShmem) of a fresh process that has loaded torch and deepoffload and run an operator.

    Args:
        libraries: names of modules that the program loads, too; one that cannot be imported counts as nothing.
    """
    root = str(Path(__file__).parents[2])  # however this program found it, the new one does, too
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, *libraries],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return int(done.stdout)


def update_rate(meet: Callable[[], object]) -> float:
    """Bytes per second that the host update of bf16 weights touches (``UPDATE_TOUCHES`` per parameter)."""
    n, threads = STREAM_NUMEL, torch.get_num_threads()
    weight, grad = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    remainder = torch.zeros(n, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(n, dtype=torch.float32), torch.zeros(n, dtype=torch.float32)
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

    return n * UPDATE_TOUCHES / median_seconds(update, REPEATS, meet)


UPDATE_TOUCHES = 26
"""Bytes that the update of one bf16 parameter reads and writes: weight, remainder and two moments, and the gradient."""


def _matmul_rate(dtype: torch.dtype, meet: Callable[[], object], tokens: int = 256, width: int = 1024) -> float:
    left, right = torch.ones(tokens, width, dtype=dtype), torch.ones(width, 4 * width, dtype=dtype)
    return 2 * tokens * width * 4 * width / median_seconds(lambda: torch.mm(left, right), REPEATS, meet)


def _copy_rate(meet: Callable[[], object]) -> float:
    source = torch.zeros(32 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), REPEATS, meet)


def measure_ops(run: DryRun, *, rounds: int = ROUNDS, progress: Report = silent) -> dict[Op, float]:
    """Seconds of each kernel call of a dry run, repeated with real tensors of the same shapes, strides and types.

    The calls take turns, as in the model: each finds the caches full of the others' data. Calls that cannot be repeated
    alone (they need values, not shapes) are left out.
    """
    calls = {op: _KernelCall(*run.calls[op]) for op in run.calls}
    with torch.no_grad():
        for number, op in enumerate(list(calls)):
            progress("operators of the model, first calls", number, len(run.calls))
            try:
                calls[op].once()
            except (RuntimeError, TypeError, ValueError, IndexError):
                del calls[op]
        evict = torch.zeros(max(1, COLD_BYTES - sum(call.nbytes for call in calls.values())), dtype=torch.uint8)
        for number in range(rounds):
            progress("operators of the model, round", number + 1, rounds)
            evict.fill_(1)
            for call in calls.values():
                call.once()
    return {op: statistics.median(call.times[1:]) for op, call in calls.items()}


class _KernelCall:
    """A kernel call with its inputs. ``times``: seconds of each."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        shapes = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Shape)]
        self.nbytes = sum(torch.Size(shape.shape).numel() * shape.dtype.itemsize for shape in shapes)
        self.times: list[float] = []
        self._func = func
        self._inputs = tree_map(_filled, (args, dict(kwargs)))

    def once(self) -> None:
        args, kwargs = self._inputs
        begun = time.perf_counter()
        self._func(*args, **kwargs)
        self.times.append(time.perf_counter() - begun)


def _filled(value: Any) -> Any:
    if not isinstance(value, Shape):
        return value
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    if 0 in value.stride:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    # small values: what no softmax or exponential turns into denormal numbers, which are slow
    return tensor.normal_(std=VALUES_STD) if value.dtype.is_floating_point else tensor.zero_()
