"""One measurement: a setting and a pattern, for a given time, with every transfer checked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from deepoffload.cli.nvme.data import PAGE_BYTES, PERIOD_BYTES, Buffer
from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.types import Pattern, Sample, Setting
from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import HostMapping, round_up

# What training moves at a time is larger than a block; the engine cuts it. It also keeps Python's share small.
REQUEST_MIN_BYTES = 4 << 20
# Requests waiting behind those that fill the device's queue, so that it never runs dry.
SPARE_REQUESTS = 2
WAIT_S = 120.0
MEASURE_MIN_REQUESTS = 4


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds before the clock starts, and on the clock."""

    warmup_s: float
    measure_s: float


@dataclass(frozen=True)
class Geometry:
    """How the bytes of a setting are asked for."""

    request_bytes: int
    window: int
    """Requests in flight per path."""

    @property
    def memory_bytes(self) -> int:
        """Host memory per path."""
        return self.request_bytes * self.window


def geometry_of(setting: Setting) -> Geometry:
    """Requests of whole blocks, and enough of them that ``queue_depth`` blocks are always in flight."""
    request = round_up(max(REQUEST_MIN_BYTES, setting.block_bytes), PERIOD_BYTES)
    return Geometry(request, -(-setting.flight_bytes // request) + SPARE_REQUESTS)


def smallest_file_bytes(setting: Setting) -> int:
    """A file must hold this much for the requests in flight to lie on different bytes, also when half is written."""
    geometry = geometry_of(setting)
    return 2 * geometry.request_bytes * -(-geometry.window // setting.files)


@dataclass
class Region:
    """A part of one file, gone through again and again."""

    file: BenchFile
    handle: IoFile
    offset: int
    nbytes: int
    reached_bytes: int = 0
    """How far it was gone through, at most."""
    _position: int = 0

    def next_offset(self, request_bytes: int) -> int:
        if self._position + request_bytes > self.nbytes:
            self._position = 0
        self._position += request_bytes
        self.reached_bytes = max(self.reached_bytes, self._position)
        return self.offset + self._position - request_bytes


@dataclass
class Marks:
    """A lane's clock: requests finished between two completions, and what the checks cost."""

    start_s: float = 0.0
    end_s: float = 0.0
    start_cpu_s: float = 0.0
    end_cpu_s: float = 0.0
    read_bytes: int = 0
    write_bytes: int = 0
    check_cpu_s: float = 0.0
    running: bool = False


@dataclass
class PathRequests:
    """The requests in flight on one path."""

    engine: IoEngine
    reads: list[Region]
    writes: list[Region]
    buffers: list[Buffer]
    stop: threading.Event
    marks: Marks = field(default_factory=Marks)

    def requests(self, pattern: Pattern) -> Iterator[tuple[bool, Region]]:
        """(whether it writes, where), without end: files in turn, and for MIXED the directions in turn."""
        index = 0
        while True:
            regions = [(False, self.reads)] if pattern is not Pattern.WRITE else []
            regions += [(True, self.writes)] if pattern is not Pattern.READ else []
            for writes, where in regions:
                yield writes, where[index % len(where)]
            index += 1


@dataclass(frozen=True)
class _InFlight:
    ticket: Ticket
    writes: bool
    region: Region
    offset: int
    buffer: Buffer


class Job:
    """Files opened through one engine for one setting; measures any pattern on them.

    Args:
        files: per path, the files in use; what is filled of them is measured.
        memory: per path, a painted mapping of at least ``geometry_of(setting).memory_bytes``.
        stop: set from outside to end early (Ctrl-C).

    Raises:
        ConfigError, UnsupportedError: the engine cannot be started like this.
        IoFailure: a file cannot be opened like this (direct I/O).
    """

    def __init__(
        self,
        setting: Setting,
        files: Sequence[Sequence[BenchFile]],
        memory: Sequence[HostMapping],
        stop: threading.Event,
    ) -> None:
        self.setting = setting
        self.geometry = geometry_of(setting)
        self._files, self._memory, self._stop = files, memory, stop
        self._stack = ExitStack()
        try:
            self._engine = IoEngine(
                backend=setting.backend, queue_depth=setting.queue_depth, block_bytes=setting.block_bytes
            )
            self._stack.callback(self._engine.close)
            direct = "required" if setting.direct else "off"
            self._handles = [
                [self._engine.open_file(file.proc_path, direct=direct) for file in path_files] for path_files in files
            ]
        except BaseException:
            self._stack.close()
            raise

    def measure(self, pattern: Pattern, effort: Effort) -> Sample:
        """Moves data for ``effort`` and checks it.

        Direct transfers are measured while the queue is full: the clock runs from one completion to another. Buffered
        ones are measured from an empty page cache until everything is on the disk, since only that says what it gives.

        Raises:
            DataMismatch, IoFailure, IoTimeout
        """
        lanes = [self._lane(index, pattern) for index in range(len(self._files))]
        if self.setting.direct:
            self._run(lanes, lambda lane: _drive(lane, pattern, self.geometry, effort))
        else:
            self._drop_caches()
            self._run(lanes, lambda lane: _drive_through_cache(lane, pattern, self.geometry, effort.measure_s))
        marks = [lane.marks for lane in lanes]
        seconds = max(mark.end_s for mark in marks) - min(mark.start_s for mark in marks)
        cpu_s = max(mark.end_cpu_s for mark in marks) - min(mark.start_cpu_s for mark in marks)
        return Sample(
            bytes_read=sum(mark.read_bytes for mark in marks),
            bytes_written=sum(mark.write_bytes for mark in marks),
            seconds=max(seconds, 1e-9),
            cpu_s=max(0.0, cpu_s - sum(mark.check_cpu_s for mark in marks)),
        )

    def fill(self, deadline_s: float) -> float:
        """Writes all files for the first time, or as far as there is time; returns bytes per second.

        ``filled_bytes`` of every file is then what was written. At least enough for ``setting`` is written.

        Args:
            deadline_s: on the clock of ``time.monotonic``.
        """
        request, begin, total = self.geometry.request_bytes, time.perf_counter(), 0
        least = smallest_file_bytes(self.setting)
        for index, path_files in enumerate(self._files):
            share_s = (deadline_s - time.monotonic()) / (len(self._files) - index)
            until = time.monotonic() + share_s
            lane = self._lane(index, Pattern.WRITE, [file.size_bytes for file in path_files])
            in_flight, free = deque[_InFlight](), list(lane.buffers)
            steps = min(file.size_bytes for file in path_files) // request
            for step in range(steps):
                if self._stop.is_set() or (time.monotonic() >= until and step * request >= least):
                    break
                for region in lane.writes:
                    if not free:
                        free.append(in_flight[0].buffer)
                        _finish(lane, in_flight.popleft())
                    in_flight.append(_submit(lane, True, region, free.pop()))
                    total += request
            while in_flight:
                _finish(lane, in_flight.popleft())
            for region in lane.writes:
                region.handle.sync()
                region.file.filled_bytes = region.reached_bytes
        return total / (time.perf_counter() - begin)

    def verify(self, limit_bytes: int, deadline_s: float) -> int:
        """Reads up to ``limit_bytes`` of each file and compares every byte; returns how many were compared.

        Raises:
            DataMismatch, IoFailure, IoTimeout
        """
        compared = 0
        for index in range(len(self._files)):
            lane = self._lane(index, Pattern.READ)
            buffer = lane.buffers[0]
            for region in lane.reads:
                for _ in range(min(limit_bytes, region.nbytes) // buffer.size):
                    if self._stop.is_set() or time.monotonic() >= deadline_s:
                        return compared
                    buffer.poison()
                    item = _submit(lane, False, region, buffer)
                    item.ticket.wait(WAIT_S)
                    # The buffer now holds what it held before: the file's data.
                    stamps = region.file.stamps(item.offset, buffer.size)
                    buffer.check_all(stamps, region.file.name, item.offset // PAGE_BYTES)
                    compared += buffer.size
        return compared

    def close(self) -> None:
        """Waits for what is in flight. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_caches(self) -> None:
        for path_files in self._files:
            for file in path_files:
                file.drop_cache()

    def _lane(self, index: int, pattern: Pattern, sizes: Sequence[int] | None = None) -> PathRequests:
        """The requests on one path; ``sizes``: how much of each file, by default what is filled."""
        request = self.geometry.request_bytes
        reads, writes = [], []
        sizes = [file.filled_bytes for file in self._files[index]] if sizes is None else sizes
        for file, handle, size in zip(self._files[index], self._handles[index], sizes, strict=True):
            filled = size // request * request
            half = filled // 2 // request * request
            if pattern is Pattern.MIXED:
                reads.append(Region(file, handle, 0, half))
                writes.append(Region(file, handle, half, filled - half))
            else:
                reads.append(Region(file, handle, 0, filled))
                writes.append(reads[-1])
        memory = self._memory[index]
        view = memoryview(memory.buffer)
        buffers = [
            Buffer(view[slot * request : (slot + 1) * request], memory.address + slot * request)
            for slot in range(self.geometry.window)
        ]
        return PathRequests(self._engine, reads, writes, buffers, self._stop)

    @staticmethod
    def _run(lanes: list[PathRequests], drive: Callable[[PathRequests], None]) -> None:
        if len(lanes) == 1:
            drive(lanes[0])
            return
        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = [pool.submit(drive, lane) for lane in lanes]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for lane in lanes:
                    lane.stop.set()
                raise


def _submit(lane: PathRequests, writes: bool, region: Region, buffer: Buffer) -> _InFlight:
    offset = region.next_offset(buffer.size)
    if writes:
        before = time.thread_time()
        buffer.stamp(region.file.next_stamps(offset, buffer.size))
        lane.marks.check_cpu_s += (time.thread_time() - before) if lane.marks.running else 0.0
    submit = lane.engine.write if writes else lane.engine.read
    return _InFlight(submit(region.handle, buffer.address, buffer.size, offset), writes, region, offset, buffer)


def _finish(lane: PathRequests, item: _InFlight) -> None:
    item.ticket.wait(WAIT_S)
    marks = lane.marks
    if not item.writes:
        before = time.thread_time()
        stamps = item.region.file.stamps(item.offset, item.buffer.size)
        item.buffer.check_stamps(stamps, item.region.file.name, item.offset // PAGE_BYTES)
        marks.check_cpu_s += (time.thread_time() - before) if marks.running else 0.0
    if marks.running:
        marks.read_bytes += 0 if item.writes else item.buffer.size
        marks.write_bytes += item.buffer.size if item.writes else 0


def _drain(in_flight: deque[_InFlight]) -> None:
    """Waits until the memory is free again. Reads that were not started are taken back; writes are expected on disk."""
    cancelled = {id(item) for item in reversed(in_flight) if not item.writes and item.ticket.cancel()}
    for item in in_flight:
        if id(item) not in cancelled:
            item.ticket.wait(WAIT_S)
    in_flight.clear()


def _drive(lane: PathRequests, pattern: Pattern, geometry: Geometry, effort: Effort) -> None:
    """Keeps the queue full; counts from the first completion after the warm-up to the first one after the time."""
    marks, in_flight, free = lane.marks, deque[_InFlight](), list(lane.buffers)
    counted = 0
    begin = time.perf_counter()
    try:
        for writes, region in lane.requests(pattern):
            in_flight.append(_submit(lane, writes, region, free.pop()))
            if free:
                continue
            item = in_flight.popleft()
            _finish(lane, item)
            free.append(item.buffer)
            now = time.perf_counter()
            counted += 1
            if lane.stop.is_set():
                break
            if not marks.running:
                if now - begin >= effort.warmup_s and counted >= geometry.window:
                    marks.running, marks.start_s, marks.start_cpu_s, counted = True, now, time.process_time(), 0
            elif now - marks.start_s >= effort.measure_s and counted >= MEASURE_MIN_REQUESTS and counted % 2 == 0:
                break
    finally:
        marks.end_s, marks.end_cpu_s, marks.running = time.perf_counter(), time.process_time(), False
        _drain(in_flight)


def _drive_through_cache(lane: PathRequests, pattern: Pattern, geometry: Geometry, measure_s: float) -> None:
    """Goes once through the region, or as far as the time allows, then waits until the disk has everything."""
    marks, in_flight, free = lane.marks, deque[_InFlight](), list(lane.buffers)
    regions = lane.writes if pattern is Pattern.WRITE else lane.reads
    passes = sum(region.nbytes // geometry.request_bytes for region in regions)
    passes *= 2 if pattern is Pattern.MIXED else 1
    marks.running, marks.start_s, marks.start_cpu_s = True, time.perf_counter(), time.process_time()
    try:
        for index, (writes, region) in enumerate(lane.requests(pattern)):
            late = time.perf_counter() - marks.start_s >= measure_s and index >= MEASURE_MIN_REQUESTS
            if index >= passes or late or lane.stop.is_set():
                break
            if not free:
                item = in_flight.popleft()
                _finish(lane, item)
                free.append(item.buffer)
            in_flight.append(_submit(lane, writes, region, free.pop()))
        while in_flight:
            _finish(lane, in_flight.popleft())
        if pattern is not Pattern.READ:
            for region in lane.writes:
                region.handle.sync()
    except IoFailure:
        _drain(in_flight)
        raise
    finally:
        marks.end_s, marks.end_cpu_s, marks.running = time.perf_counter(), time.process_time(), False
