"""Who moves the bytes: our engine, a plain loop, fio, DeepSpeed's aio_handle, each with the best memory it can have.

Every contender prepares itself for a pattern once; then it moves data for the same time as the others whenever its turn
comes, after the same warm-up, and says how many bytes that were and how much CPU time of its process they cost. All use
the same file; ours checks its data in addition, on another one and off the clock.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol

from deepoffload.cli.nvme.data import Buffer
from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.fio import run_fio
from deepoffload.cli.nvme.job import Effort, Job
from deepoffload.cli.nvme.types import Pattern, Sample, Setting
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import HostMapping

HUGE_PAGE_BYTES, MADV_COLLAPSE = 2 << 20, 25
EXTENT_BYTES = 128 << 20
CHECK_EFFORT = Effort(0.0, 0.02)

Round = Callable[[], tuple[int, int]]
"""Moves some data; says how many bytes were read and written."""


Turn = Callable[[Effort], Sample]
"""Moves data for so long; nothing is in flight before and after."""


class Contender(Protocol):
    name: str

    def prepare(self, stack: ExitStack, pattern: Pattern, block_bytes: int, depth: int) -> Turn:
        """What it needs stays until ``stack`` closes."""


def repeat(run: Round, effort: Effort) -> Sample:
    """Whole rounds for the warm-up, then for at least the time."""
    until = time.perf_counter() + effort.warmup_s
    while time.perf_counter() < until:
        run()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    read, written = 0, 0
    while time.perf_counter() < start_s + effort.measure_s:
        more_read, more_written = run()
        read, written = read + more_read, written + more_written
    return Sample(read, written, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def split(pattern: Pattern, nbytes: int) -> tuple[int, int]:
    """Bytes read from the front of the file, and bytes written behind them."""
    return {Pattern.READ: (nbytes, 0), Pattern.WRITE: (0, nbytes), Pattern.MIXED: (nbytes // 2, nbytes // 2)}[pattern]


def move(one: Contender, pattern: Pattern, block_bytes: int, depth: int, effort: Effort) -> Sample:
    """A single turn."""
    with ExitStack() as stack:
        return one.prepare(stack, pattern, block_bytes, depth)(effort)


def requests_of(size_bytes: int, memory_bytes: int, block_bytes: int, depth: int) -> tuple[int, int]:
    """Bytes of a request, and how many are in flight: large extents, as many as keep the queue full."""
    request = max(block_bytes, min(EXTENT_BYTES, size_bytes // 4, memory_bytes // 2))
    window = -(-block_bytes * depth // request) + 1
    if request * window > memory_bytes:
        raise ValueError(f"{memory_bytes} bytes of memory do not hold {window} requests of {request} bytes")
    return request, window


class Ours:
    """The engine with requests of up to 128 MiB, one ticket each, and as many of them as keep its queue full.

    That is what a piece of optimizer state takes in DeepSpeed's settings of benchmarks/end_to_end; fio asks for single
    blocks, aio_handle for the whole file at once.

    Like the others it does not look at the data while the clock runs; before that it checks data for a moment on a file
    of its own.
    """

    def __init__(self, backend: str, file: BenchFile, checked: BenchFile, memory: HostMapping) -> None:
        self.name = f"deepoffload {backend}"
        self._backend, self._file, self._checked, self._memory = backend, file, checked, memory

    def prepare(self, stack: ExitStack, pattern: Pattern, block_bytes: int, depth: int) -> Turn:
        setting = Setting(self._backend, block_bytes, depth, True, 1)
        with Job(setting, [[self._checked]], [self._memory], threading.Event()) as job:
            job.measure(pattern, CHECK_EFFORT)
        request_bytes, window = requests_of(self._file.size_bytes, self._memory.nbytes, block_bytes, depth)
        engine = IoEngine(backend=self._backend, queue_depth=depth, block_bytes=block_bytes)
        stack.callback(engine.close)
        in_flight: deque[tuple[Ticket, int, int]] = deque()
        requests = itertools.cycle(self._requests(engine, pattern, request_bytes))
        end = self._memory.address + request_bytes * window
        slots = itertools.cycle(range(self._memory.address, end, request_bytes))

        def run() -> tuple[int, int]:
            """One request more; the first calls fill the window."""
            while True:
                start, handle, offset, read, written = next(requests)
                in_flight.append((start(handle, next(slots), request_bytes, offset), read, written))
                if len(in_flight) == window:
                    ticket, read, written = in_flight.popleft()
                    ticket.wait()
                    return read, written

        def turn(effort: Effort) -> Sample:
            sample = repeat(run, effort)
            while in_flight:
                in_flight.popleft()[0].wait()
            return sample

        return turn

    def _requests(self, engine: IoEngine, pattern: Pattern, nbytes: int) -> list[tuple[Any, IoFile, int, int, int]]:
        reads, writes = split(pattern, self._file.size_bytes)
        handle = engine.open_file(self._file.proc_path, direct="required")
        found: list[tuple[Any, IoFile, int, int, int]] = []
        for offset in range(0, max(reads, writes), nbytes):
            found += [(engine.read, handle, offset, nbytes, 0)] if offset < reads else []
            found += [(engine.write, handle, reads + offset, 0, nbytes)] if offset < writes else []
        return found


class PlainLoop:
    """pread and pwrite of whole blocks with O_DIRECT, on ``depth`` threads or on one; memory on huge pages."""

    def __init__(self, threads: bool, file: BenchFile, memory: HostMapping) -> None:
        self.name = "pread/pwrite, threads" if threads else "pread/pwrite, one thread"
        self._threads, self._file, self._memory = threads, file, memory

    def prepare(self, stack: ExitStack, pattern: Pattern, block_bytes: int, depth: int) -> Turn:
        reads, writes = split(pattern, self._file.size_bytes)
        descriptor = os.open(self._file.proc_path, os.O_RDWR | os.O_DIRECT)
        stack.callback(os.close, descriptor)
        pool = stack.enter_context(ThreadPoolExecutor(depth))
        view = memoryview(self._memory.buffer)
        jobs: list[tuple[Callable[..., int], int, int]] = []
        for offset in range(0, max(reads, writes), block_bytes):
            # The memory of `depth` blocks is used in turn, as in any program that has not the file's size in memory.
            slot = len(jobs) % depth * block_bytes
            jobs += [(os.preadv, offset, slot)] if offset < reads else []
            jobs += [(os.pwritev, reads + offset, slot)] if offset < writes else []

        def one(job: tuple[Callable[..., int], int, int]) -> None:
            call, offset, slot = job
            if call(descriptor, [view[slot : slot + block_bytes]], offset) != block_bytes:
                raise RuntimeError(f"{self.name}: a transfer at {offset} was cut short")

        def run() -> tuple[int, int]:
            for _ in pool.map(one, jobs) if self._threads else map(one, jobs):
                pass
            return reads, writes

        return lambda effort: repeat(run, effort)


class Fio:
    """fio with huge pages under its buffers where glibc can give them (2.35)."""

    def __init__(self, ioengine: str, file: BenchFile) -> None:
        self.name = f"fio {ioengine}"
        self._backend, self._file = ioengine, file
        self._program = shutil.which("fio") or ""

    def prepare(self, stack: ExitStack, pattern: Pattern, block_bytes: int, depth: int) -> Turn:
        setting = Setting(self._backend, block_bytes, depth, True, 1)
        return lambda effort: run_fio(self._program, setting, pattern, [self._file], 1, effort)


class DeepSpeed:
    """``aio_handle`` over memory that it locked itself; MIXED with two handles of half the depth, one per direction.

    Args:
        huge_pages: Make huge pages of that memory first (``MADV_COLLAPSE``, Linux 6.1), which DeepSpeed does not do.
    """

    def __init__(self, file: BenchFile, *, huge_pages: bool) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._handle_class = AsyncIOBuilder().load(verbose=False).aio_handle
        self.name = "DeepSpeed aio_handle, huge" if huge_pages else "DeepSpeed aio_handle"
        self._huge_pages = huge_pages
        self.huge_page_share_min = 1.0 if huge_pages else 0.0
        self._file = file
        self._example = torch.empty(0, dtype=torch.uint8)

    def handle(self, block_bytes: int, depth: int) -> Any:
        """Without single_submit, with overlap_events: DeepSpeed's defaults in training."""
        return self._handle_class(block_bytes, depth, False, True, 1)

    def prepare(self, stack: ExitStack, pattern: Pattern, block_bytes: int, depth: int) -> Turn:
        reads, writes = split(pattern, self._file.size_bytes)
        path, sizes = self._file.proc_path, [size for size in (reads, writes) if size]
        handles = [self.handle(block_bytes, max(1, depth // len(sizes))) for _ in sizes]
        tensors = []
        for handle, size in zip(handles, sizes, strict=True):
            # Only the handle that locked a tensor knows that it is locked; it would copy any other.
            tensor = handle.new_cpu_locked_tensor(size, self._example)
            stack.callback(handle.free_cpu_locked_tensor, tensor)
            tensor.fill_(7)
            if self._huge_pages:
                share = collapse(tensor.data_ptr(), tensor.numel())
                self.huge_page_share_min = min(self.huge_page_share_min, share)
            tensors.append(tensor)

        def run() -> tuple[int, int]:
            if reads:
                handles[0].async_pread(tensors[0], path, 0)
            if writes:
                handles[-1].async_pwrite(tensors[-1], path, reads)
            for handle in handles:
                if handle.wait() != 1:
                    raise RuntimeError("aio_handle did not finish its operation")
            return reads, writes

        return lambda effort: repeat(run, effort)


def collapse(address: int, nbytes: int) -> float:
    """Makes huge pages of memory that is already there; returns the share that the kernel had huge pages for."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = range(first, address + nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
    size = ctypes.c_size_t(HUGE_PAGE_BYTES)
    refused = sum(libc.madvise(ctypes.c_void_p(page), size, MADV_COLLAPSE) != 0 for page in pages)
    return 1 - refused / max(1, len(pages))


def huge_memory(stack: ExitStack, nbytes: int) -> HostMapping:
    """Painted memory on huge pages."""
    mapping = stack.enter_context(HostMapping(nbytes))
    Buffer(mapping.buffer, mapping.address).paint()
    return mapping
