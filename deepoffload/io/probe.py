"""What a path can do: direct I/O or not and why, and how many bytes per second.

A measurement takes about a second and is kept per path in the user's cache directory, so that a run starts with numbers
of this disk instead of guesses.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deepoffload.errors import BudgetError
from deepoffload.io.engine import IoEngine
from deepoffload.io.extents import Extent
from deepoffload.io.kept_measurements import has_names, kept, kept_file, write_kept
from deepoffload.io.swap_files import check_paths, create_swap_file, free_bytes
from deepoffload.io.swap_space import SPACE_MARGIN_BYTES, SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import HostMapping

REQUEST_BYTES = 8 << 20
REQUESTS_IN_FLIGHT = 4
FILE_BYTES = 256 << 20
_RATES = ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s")


@dataclass(frozen=True)
class PathReport:
    """What transfers on ``path`` will be like. Alignments in bytes (1 where transfers are buffered)."""

    path: str
    direct: bool
    direct_reason: str
    memory_align: int
    offset_align: int
    free_bytes: int


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of large transfers: reading alone, writing alone, and both at once in total."""

    path: str
    backend: str
    direct: bool
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    measured_at_unix_s: float

    @property
    def overlap(self) -> float:
        """How far equal amounts of reads and writes overlap: 0.0 half duplex (one waits for the other), 1.0 full."""
        serial = 2 / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)
        parallel = 2 * min(self.read_bytes_per_s, self.write_bytes_per_s)
        if parallel <= serial * 1.001:
            return 1.0 if self.mixed_bytes_per_s >= serial else 0.0
        return min(1.0, max(0.0, (self.mixed_bytes_per_s - serial) / (parallel - serial)))


def probe_path(path: str | os.PathLike[str], engine: IoEngine) -> PathReport:
    """Opens a file there, tries a direct transfer, leaves nothing.

    Raises:
        ConfigError: The path is missing, not a directory, or not writable.
    """
    (directory,) = check_paths([path])
    file = create_swap_file(engine, directory, "probe", "preferred")
    try:
        code = file.direct_errno
        reason = "O_DIRECT works" if file.direct else f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
        return PathReport(directory, file.direct, reason, file.memory_align, file.offset_align, free_bytes(directory))
    finally:
        file.close()


def measure_bandwidth(
    path: str | os.PathLike[str],
    engine: IoEngine,
    *,
    time_s: float = 1.0,
    use_cache: bool = True,
    key: str = "nvme_path",
) -> Bandwidth:
    """Reads, writes, and does both on a temporary file (up to 256 MiB) for about ``time_s`` in all.

    Args:
        use_cache: Return what was measured on this path with this backend in the last 30 days, if anything was. The
            result is stored either way; a cache that cannot be written is no error.
        key: What names the path, of the configuration or a command: for errors.

    Raises:
        ConfigError: The path is missing, not a directory, or not writable.
        BudgetError: There is not even room for a small file.
    """
    (directory,) = check_paths([path], key)
    known = cached_bandwidth(directory, engine.backend) if use_cache else None
    if known is not None:
        return known
    size = min(FILE_BYTES, (free_bytes(directory) - SPACE_MARGIN_BYTES) // 2) // REQUEST_BYTES * REQUEST_BYTES
    if size < 2 * REQUEST_BYTES:
        needed = SPACE_MARGIN_BYTES + 4 * REQUEST_BYTES
        raise BudgetError(
            f"{key}: {directory} has no room for a measurement: {free_bytes(directory)} bytes are free, and {needed} "
            "are needed at least. Make room there, or name another directory"
        )
    with (
        HostMapping(REQUEST_BYTES * REQUESTS_IN_FLIGHT) as memory,
        SwapSpace(engine, [directory], budget_bytes=size, label="measure", key=key) as swap,
    ):
        measured = _measure(swap, memory, directory, engine.backend, size, time_s)
    store_bandwidth(measured)
    return measured


def cached_bandwidth(path: str | os.PathLike[str], backend: str) -> Bandwidth | None:
    """What was measured on ``path`` with this backend in the last 30 days, on this machine and disk; else ``None``.

    Raises:
        ConfigError: The path is missing, not a directory, or not writable.
    """
    (directory,) = check_paths([path])

    def check(found: dict[str, Any]) -> None:
        has_names(found, [field.name for field in fields(Bandwidth)])
        if (found["path"], found["backend"]) != (directory, backend) or type(found["direct"]) is not bool:
            raise ValueError("it is about another path or backend")

    found = kept(_cache_file(directory, backend), "the disk", check, _RATES)
    return Bandwidth(**found) if found else None


def store_bandwidth(measured: Bandwidth) -> Path | None:
    """Keeps it where :func:`cached_bandwidth` and :func:`measure_bandwidth` look, in place of what is there.

    Atomically: a reader sees the old file or the new one.

    Returns:
        The file that was written; ``None`` when the cache directory cannot be written (a read-only home) or is not a
        directory of this user: the path is then measured again next time.

    Raises:
        ConfigError: ``measured.path`` is missing, not a directory, or not writable.
    """
    (directory,) = check_paths([measured.path])
    file = _cache_file(directory, measured.backend)
    return file if write_kept(file, asdict(measured)) else None


def stripe_weights(measured: Sequence[Bandwidth]) -> list[float]:
    """Weights for :class:`~deepoffload.io.swap_space.SwapSpace` over these paths: their rates under mixed load."""
    return [path.mixed_bytes_per_s for path in measured]


def _measure(swap: SwapSpace, memory: HostMapping, path: str, backend: str, size: int, time_s: float) -> Bandwidth:
    random = os.urandom(REQUEST_BYTES)  # a device may compress or skip zeros
    for slot in range(REQUESTS_IN_FLIGHT):
        memory.buffer[slot * REQUEST_BYTES : (slot + 1) * REQUEST_BYTES] = random
    swap.reserve(size)
    extents = [swap.allocate(REQUEST_BYTES) for _ in range(size // REQUEST_BYTES)]

    def address(index: int) -> int:
        return memory.address + index % REQUESTS_IN_FLIGHT * REQUEST_BYTES

    # The first write into new blocks is slower than all later ones, so it is not measured; a slow disk gets fewer.
    filled, until = 0, time.perf_counter() + time_s / 4
    while filled < len(extents) and (filled < 2 or time.perf_counter() < until):
        swap.write(extents[filled], address(filled)).wait()
        filled += 1

    def read(index: int, extent: Extent) -> Ticket:
        return swap.read(extent, address(index))

    def write(index: int, extent: Extent) -> Ticket:
        return swap.write(extent, address(index))

    def both(index: int, extent: Extent) -> Ticket:
        return (read if index % 2 else write)(index, extent)

    used = extents[:filled]
    read_rate, write_rate, mixed_rate = (_rate(submit, used, time_s / 4) for submit in (read, write, both))
    return Bandwidth(path, backend, swap.direct[0], read_rate, write_rate, mixed_rate, time.time())


def _rate(submit: Callable[[int, Extent], Ticket], extents: list[Extent], time_s: float) -> float:
    """Bytes per second with ``REQUESTS_IN_FLIGHT`` requests in flight, for ``time_s`` and at least twice that many."""
    start = time.perf_counter()
    tickets: list[Ticket] = []
    index = 0
    while index < 2 * REQUESTS_IN_FLIGHT or time.perf_counter() - start < time_s:
        if len(tickets) == REQUESTS_IN_FLIGHT:
            tickets.pop(0).wait()  # its memory is the one that the next request uses
        tickets.append(submit(index, extents[index % len(extents)]))
        index += 1
    for ticket in tickets:
        ticket.wait()
    return index * REQUEST_BYTES / (time.perf_counter() - start)


def _cache_file(path: str, backend: str) -> Path:
    return kept_file("bandwidth", f"{path}\0{os.stat(path).st_dev}\0{os.uname().nodename}\0{backend}")
