"""Requests that are small, of different sizes, or in memory that nobody prepared: ours and aio_handle. What submitting
costs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.io.contenders import DeepSpeed, repeat
from deepoffload.cli.nvme.data import PAGE_BYTES, Buffer
from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.job import Effort
from deepoffload.cli.nvme.types import Pattern, Sample
from deepoffload.io.engine import IoEngine
from deepoffload.native.aio import HostMapping, round_up

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES, DEPTH = MIB, 16
EFFORT = Effort(0.1, 0.4)
TORCH_ALIGNMENT = 64
SUBMIT_BYTES, SUBMITS = 64 * MIB, 40


@dataclass(frozen=True)
class Case:
    name: str
    sizes: Sequence[int]
    """Bytes of each request; one after the other in the file, all in flight together."""
    locked: bool
    """Whether the memory is what the tool itself hands out."""
    page_aligned: bool = True
    """Whether memory that is not begins on a page, as direct transfers ask; ours copies what does not."""


def cases(total: int) -> list[Case]:
    random_sizes = random.Random(1)
    mixed: list[int] = []
    while sum(mixed) < total // 2:
        mixed.append(random_sizes.choice([64 * KIB, 256 * KIB, MIB, 3 * MIB, 10 * MIB, 32 * MIB]))
    return [
        Case("64 KiB requests", [64 * KIB] * min(2048, total // (64 * KIB)), True),
        Case("256 KiB requests", [256 * KIB] * min(1024, total // (256 * KIB)), True),
        Case("requests of 64 KiB to 32 MiB", mixed, True),
        Case("an ordinary tensor, not locked, small pages, one request", [total // 2], False),
        Case("the same where torch puts it, not at the beginning of a page", [total // 2], False, page_aligned=False),
    ]


def small_cases(deepspeed: DeepSpeed, file: BenchFile, rounds: int) -> list[dict[str, Any]]:
    """Rows of both rates and the median ratio over interleaved rounds."""
    rows = []
    for case in cases(file.size_bytes):
        for pattern in (Pattern.READ, Pattern.WRITE):
            pairs = [
                (run_ours(case, pattern, file), run_deepspeed(case, pattern, file, deepspeed)) for _ in range(rounds)
            ]
            mine, other = zip(*pairs, strict=True)
            rows.append(
                {
                    "case": case.name,
                    "pattern": pattern.value,
                    "requests": len(case.sizes),
                    "ours_mb_s": statistics.median(sample.bytes_per_s for sample in mine) / 1e6,
                    "deepspeed_mb_s": statistics.median(sample.bytes_per_s for sample in other) / 1e6,
                    "ours_cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in mine),
                    "deepspeed_cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in other),
                    "ratio": statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in pairs),
                }
            )
    return rows


def submit_cost(file: BenchFile) -> dict[str, float]:
    """Microseconds that submitting a request of 64 MiB takes its caller, in Python and below.

    To an idle engine, where the submitting thread may push the caller off its processor, and to a busy one.
    """
    idle: list[float] = []
    busy: list[float] = []
    cpu: list[float] = []
    nbytes = min(SUBMIT_BYTES, file.size_bytes)
    with HostMapping(nbytes) as mapping, IoEngine(queue_depth=DEPTH) as engine:
        Buffer(mapping.buffer, mapping.address).bytes.fill(7)
        handle = engine.open_file(file.proc_path, direct="required")
        for _ in range(SUBMITS):
            times = [(time.perf_counter_ns(), time.thread_time_ns())]
            tickets = []
            for _ in (idle, busy):
                tickets.append(engine.read(handle, mapping.address, nbytes, 0))
                times.append((time.perf_counter_ns(), time.thread_time_ns()))
            for ticket in tickets:
                ticket.wait()
            idle.append((times[1][0] - times[0][0]) / 1e3)
            cpu.append((times[1][1] - times[0][1]) / 1e3)
            busy.append((times[2][0] - times[1][0]) / 1e3)
    median = statistics.median
    return {"idle_wall_us": median(idle), "idle_thread_cpu_us": median(cpu), "busy_wall_us": median(busy)}


def _sample(case: Case, pattern: Pattern, run: Callable[[], None]) -> Sample:
    total = sum(case.sizes)

    def moved() -> tuple[int, int]:
        run()
        return (total, 0) if pattern is Pattern.READ else (0, total)

    return repeat(moved, EFFORT)


def run_ours(case: Case, pattern: Pattern, file: BenchFile) -> Sample:
    """On huge pages, or in an ordinary tensor."""
    total = sum(case.sizes)
    if not case.locked:
        tensor = torch.empty(total + PAGE_BYTES, dtype=torch.uint8).fill_(7)
        return _ours_at(
            case, pattern, file, round_up(tensor.data_ptr()) + (0 if case.page_aligned else TORCH_ALIGNMENT)
        )
    with HostMapping(total) as mapping:
        Buffer(mapping.buffer, mapping.address).bytes.fill(7)
        return _ours_at(case, pattern, file, mapping.address)


def _ours_at(case: Case, pattern: Pattern, file: BenchFile, address: int) -> Sample:
    engine = IoEngine(backend="libaio", queue_depth=DEPTH, block_bytes=BLOCK_BYTES, pending_max=len(case.sizes))
    handle = engine.open_file(file.proc_path, direct="required")
    start = engine.read if pattern is Pattern.READ else engine.write

    def run() -> None:
        offset, tickets = 0, []
        for nbytes in case.sizes:
            tickets.append(start(handle, address + offset, nbytes, offset))
            offset += nbytes
        for ticket in tickets:
            ticket.wait()

    try:
        sample = _sample(case, pattern, run)
        if engine.stats()["chunks_buffered"]:
            raise RuntimeError(f"{case.name}: something went through the page cache, so this is no measurement")
        return sample
    finally:
        engine.close()


def run_deepspeed(case: Case, pattern: Pattern, file: BenchFile, deepspeed: DeepSpeed) -> Sample:
    handle = deepspeed.handle(BLOCK_BYTES, DEPTH)
    empty = torch.empty(0, dtype=torch.uint8)
    if case.locked:
        tensors = [handle.new_cpu_locked_tensor(nbytes, empty).fill_(7) for nbytes in case.sizes]
    else:
        tensors = [torch.empty(nbytes, dtype=torch.uint8).fill_(7) for nbytes in case.sizes]
    start = handle.async_pread if pattern is Pattern.READ else handle.async_pwrite

    def run() -> None:
        offset = 0
        for tensor in tensors:
            start(tensor, file.proc_path, offset)
            offset += tensor.numel()
        if handle.wait() != len(tensors):
            raise RuntimeError("aio_handle did not finish its operations")

    try:
        return _sample(case, pattern, run)
    finally:
        if case.locked:
            for tensor in tensors:
                handle.free_cpu_locked_tensor(tensor)
