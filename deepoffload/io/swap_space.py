"""Swap space: extents on one file per path, allocated before they are written, gone with the process."""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from deepoffload.errors import BudgetError, ClosedError, ConfigError, IoFailure, UsageError
from deepoffload.io.checksums import SUM_BYTES, ChecksumTable
from deepoffload.io.engine import PADDED, READ, URGENT, WRITE, IoEngine, IoFile
from deepoffload.io.extents import (
    Extent,
    ExtentPart,
    ExtentRange,
    FreeList,
    SourceExtent,
    cut_ranges,
    split_by_weight,
)
from deepoffload.io.header_pages import HEADER_BYTES
from deepoffload.io.named_files import open_named_files
from deepoffload.io.source_files import SourceFiles
from deepoffload.io.swap_files import (
    buffered_warning,
    check_paths,
    close_files,
    create_swap_file,
    free_bytes,
    reclaim_stale,
)
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import PAGE_BYTES, ffi, round_up

# Left free on every file system: a full one breaks other programs, and some slow down near the end.
SPACE_MARGIN_BYTES = 64 << 20
# Files grow by whole steps, so that they stay in few pieces on disk.
GROW_STEP_BYTES = 2 << 20
# A part of an extent on one path is at least this large; smaller extents lie on one path.
STRIPE_MIN_BYTES = 1 << 20


class SwapSpace:
    """Extents striped over one swap file per path.

    Each file is created locked and unlinked at once, so that no way to die leaves it behind; blocks are allocated when
    it grows, never by a write. Large extents are divided among the paths in proportion to ``weights``; a full path gets
    less.

    Contract of ``read`` and ``write``: the address is a multiple of 4096, and the memory up to the next multiple of
    4096 behind the last byte is mapped and belongs to the request. A direct transfer rounds its length up inside the
    extent's own padding, on disk as in memory: a read may change those bytes, a write stores what is in them.

    A ``SourceExtent`` lies in a file of somebody else (``sources``): it is read like the others, and is always frozen.

    An extent has holders: the one that allocated it, and those that :meth:`hold` it because they still need what lies
    in it. Each gives it back with :meth:`free`; the disk space is free when the last one has. While there are several,
    the extent is *frozen*: nobody may write to it. Holding and freeing are safe from any thread.

    It has many methods, because nothing else knows where an extent lies: each is one question or one transfer.

    Args:
        engine: Does the transfers; it must outlive the swap space.
        paths: Directories. All are checked before anything is created.
        budget_bytes: Most that all files together may take on disk; ``None``: what the file systems have.
        direct: ``preferred`` (buffered with a warning where direct I/O fails), ``required`` or ``off``.
        label: Part of the files' names.
        weights: Relative bandwidths of the paths; equal when not given.
        verify: Keep a CRC-32C of every block written and compare when it is read (key ``aio.verify``).
        key: Of the configuration, that names ``paths``: for errors.
        named: The files have names and outlive the process (``io.named_files``); what they hold is
            :class:`~deepoffload.io.durable_store.DurableStore`'s to say. Checksums are kept then, for its records.
        rank: Of several, in the names of these files; as its launcher counts when not said.

    Raises:
        ConfigError: A path is missing, not a directory, not writable, or cannot do what ``direct`` asks.
        UsageError: Another process uses a named file.
    """

    def __init__(
        self,
        engine: IoEngine,
        paths: Sequence[str | os.PathLike[str]],
        *,
        budget_bytes: int | None = None,
        direct: str = "preferred",
        label: str = "swap",
        weights: Sequence[float] | None = None,
        verify: bool = False,
        named: bool = False,
        rank: int | None = None,
        key: str = "nvme_path",
    ) -> None:
        self.paths = check_paths(paths, key)
        self._key = key
        self.budget_bytes = budget_bytes
        self.weights = [1.0] * len(self.paths) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.paths) or not all(weight > 0 for weight in self.weights):
            raise ConfigError(f"weights {self.weights}: one positive number for each of {len(self.paths)} paths")
        if not label or not label.isascii() or "/" in label:
            raise ConfigError(f"label {label!r}: plain letters and digits for a file name")
        self.bytes_read = 0
        self.bytes_written = 0
        self._engine = engine
        self.sources = SourceFiles(engine)
        self._sums = ChecksumTable(engine) if verify or named else None
        self._compared = self._sums if verify else None
        self._more_holders: dict[Extent, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._files: tuple[IoFile, ...] = ()
        self._free = [FreeList() for _ in self.paths]
        self._open: list[IoFile] = []
        self._finalizer = weakref.finalize(self, close_files, self._open, 10.0)
        try:
            for path in self.paths:
                reclaim_stale(path)
                if not named:
                    self._open.append(create_swap_file(engine, path, label, direct, key))
            if named:
                self._open += open_named_files(engine, self.paths, direct, rank)
                self._take_over()
            self._files = tuple(self._open)
        except BaseException:
            self.close()
            raise
        for path, file in zip(self.paths, self._files, strict=True):
            if direct == "preferred" and not file.direct:
                warnings.warn(buffered_warning(path, file), RuntimeWarning, stacklevel=2)

    @property
    def direct(self) -> tuple[bool, ...]:
        """Per path: whether transfers bypass the page cache."""
        return tuple(file.direct for file in self._files)

    @property
    def files(self) -> tuple[IoFile, ...]:
        """The file of each path; for this package's modules."""
        return self._files

    @property
    def engine(self) -> IoEngine:
        return self._engine

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated on disk."""
        return sum(free.capacity_bytes for free in self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of extents, with their padding."""
        return sum(free.used_bytes for free in self._free)

    def reserve(self, total_nbytes: int) -> None:
        """Makes sure that files of ``total_nbytes`` in all exist now, allocated.

        Raises:
            BudgetError: Over the budget, or the file systems do not have the room; says how much is missing.
        """
        with self._lock:
            self._check_open()
            missing = round_up(total_nbytes) - self.capacity_bytes
            if missing > 0:
                self._grow(missing)

    def allocate(self, nbytes: int) -> Extent:
        """An extent for ``nbytes``; files grow as needed.

        Raises:
            BudgetError: Over the budget (key ``nvme_budget``), or no room on the paths (``key``).
        """
        if nbytes <= 0:
            raise UsageError(f"an extent of {nbytes} bytes cannot be allocated")
        padded = round_up(nbytes)
        with self._lock:
            self._check_open()
            missing = padded - sum(free.free_bytes for free in self._free)
            if missing > 0:
                self._grow(missing)
            return Extent(nbytes, tuple(self._take(padded)))

    def hold(self, extent: Extent) -> None:
        """One more holder: the extent is frozen until all but one have freed it.

        Raises:
            UsageError: It is not allocated.
        """
        with self._lock:
            own = () if isinstance(extent, SourceExtent) else extent.pieces
            if not all(self._free[piece.path_index].is_taken(piece.offset, piece.nbytes) for piece in own):
                raise UsageError(f"an extent of {extent.nbytes} bytes that is not allocated cannot be held")
            self._more_holders[extent] = self._more_holders.get(extent, 0) + 1

    def is_frozen(self, extent: Extent) -> bool:
        """Whether an extent has several holders, or is not ours to write to."""
        return extent in self._more_holders or isinstance(extent, SourceExtent)

    def free(self, extent: Extent) -> None:
        """One holder less. The last one returns the extent; no request on it may be in flight then.

        Raises:
            UsageError: It is not allocated (freed twice?).
        """
        with self._lock:
            more = self._more_holders.pop(extent, 0)
            if more:
                if more > 1:
                    self._more_holders[extent] = more - 1
                return
            if isinstance(extent, SourceExtent):
                return
            for piece in extent.pieces:
                self._free[piece.path_index].give(piece.offset, piece.nbytes)
            if self._sums is not None:
                self._sums.forget(extent)

    def claim(self, extent: Extent) -> bool:
        """Allocate exactly this extent, which a named file has held since an earlier run; False when some of it is not
        free, or is none of these files'."""
        with self._lock:
            self._check_open()
            taken: list[ExtentPart] = []
            for part in extent.pieces:
                if part.path_index >= len(self._free) or not self._free[part.path_index].take_at(
                    part.offset, part.nbytes
                ):
                    for other in taken:
                        self._free[other.path_index].give(other.offset, other.nbytes)
                    return False
                taken.append(part)
            return True

    def sums_of(self, extent: Extent) -> bytes:
        """The checksums of what was written to an extent (see ``ChecksumTable.of``), where they are kept."""
        return b"" if self._sums is None else self._sums.of(extent)

    def sync(self) -> None:
        """Wait until all that was written is on the disks.

        Raises:
            IoFailure: a disk did not take something; nobody knows what.
        """
        self._check_open()
        for file in self._files:
            file.sync()

    def read(self, extent: Extent, address: int, *, nbytes: int | None = None, urgent: bool = False) -> Ticket:
        """Reads the first ``nbytes`` (default: all) of an extent to ``address``. See the contract above.

        Raises:
            UsageError: The address is not aligned, or the extent has fewer bytes.
            ClosedError: The swap space or its engine is closed.
        """
        nbytes = extent.nbytes if nbytes is None else nbytes
        if isinstance(extent, SourceExtent):
            self._check_transfer(extent, address, nbytes)
            ticket = self.sources.read(extent, address, nbytes, urgent=urgent)
        else:
            sums = ffi.NULL if self._compared is None else self._compared.known(extent)
            ticket = self._transfer(READ, extent, address, nbytes, urgent, sums)
        self.bytes_read += nbytes
        return ticket

    def ranges(self, extent: Extent, limit_bytes: int) -> Iterator[ExtentRange]:
        """An extent cut into ranges of at most ``limit_bytes`` (at least 256 KiB) for :meth:`read_range`, in order."""
        return cut_ranges(extent, limit_bytes, self._engine.block_bytes, SUM_BYTES)

    def read_range(self, extent: Extent, part: ExtentRange, address: int) -> Ticket:
        """Reads one of :meth:`ranges` to ``address``. As :meth:`read`."""
        self._check_transfer(extent, address, part.nbytes)
        if isinstance(extent, SourceExtent):
            self.bytes_read += part.nbytes
            return self.sources.read_range(extent, part, address)
        piece = extent.pieces[part.piece]
        sums = ffi.NULL if self._compared is None else self._compared.known(extent)
        segment = ffi.new("doff_segment[1]")
        segment[0].address, segment[0].offset = address, piece.offset + part.offset
        segment[0].nbytes, segment[0].file = part.nbytes, self._files[piece.path_index].file_id
        if self._compared is not None:
            segment[0].sums_skipped = self._compared.count_before(extent, part)
        files = (self._files[piece.path_index],)
        ticket = self._engine.submit(READ, segment, 1, part.nbytes, PADDED, files, sums)
        self.bytes_read += part.nbytes
        return ticket

    def write(self, extent: Extent, address: int, *, nbytes: int | None = None, urgent: bool = False) -> Ticket:
        """Writes the first ``nbytes`` (default: all) of an extent from ``address``, which must not change until done.

        Raises:
            UsageError: The extent is frozen. Else as ``read``.
        """
        if self.is_frozen(extent):
            raise UsageError(f"an extent of {extent.nbytes} bytes is frozen: somebody still needs what lies in it")
        nbytes = extent.nbytes if nbytes is None else nbytes
        sums = ffi.NULL if self._sums is None else self._sums.to_record(extent)
        ticket = self._transfer(WRITE, extent, address, nbytes, urgent, sums)
        self.bytes_written += nbytes
        return ticket

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for what is in flight, gives the disk space back. Idempotent.

        Raises:
            IoTimeout: Some file still has transfers in flight after ``timeout_s``; the other files are closed. May be
                called again.
        """
        self._closed = True
        self.sources.close()
        close_files(self._open, timeout_s)
        self._finalizer.detach()

    def _take_over(self) -> None:
        """The named files keep their lengths; the pages in front are no extents."""
        for free, file in zip(self._free, self._open, strict=True):
            free.extend(max(file.size_at_open // PAGE_BYTES * PAGE_BYTES, HEADER_BYTES))
            free.take_at(0, HEADER_BYTES)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this swap space is closed")

    def _check_transfer(self, extent: Extent, address: int, nbytes: int) -> None:
        self._check_open()
        if address % PAGE_BYTES or not address:
            raise UsageError(f"address {address:#x} of a swap transfer is not a multiple of {PAGE_BYTES}")
        if not 0 <= nbytes <= extent.nbytes:
            raise UsageError(f"{nbytes} bytes of an extent of {extent.nbytes} bytes cannot be transferred")

    def _transfer(
        self,
        operation: int,
        extent: Extent,
        address: int,
        nbytes: int,
        urgent: bool,
        sums: Any,
    ) -> Ticket:
        self._check_transfer(extent, address, nbytes)
        flags = PADDED | URGENT if urgent else PADDED
        if len(extent.pieces) == 1:
            piece = extent.pieces[0]
            file = self._files[piece.path_index]
            return self._engine.submit_one(operation, file, address, nbytes, piece.offset, flags, sums)
        segments = ffi.new("doff_segment[]", len(extent.pieces))
        count, left = 0, nbytes
        for piece in extent.pieces:
            if left <= 0:
                break
            segment = segments[count]
            segment.address, segment.offset = address, piece.offset
            segment.nbytes = piece.nbytes if piece.nbytes < left else left
            segment.file = self._files[piece.path_index].file_id
            address += piece.nbytes
            left -= piece.nbytes
            count += 1
        return self._engine.submit(operation, segments, count, nbytes, flags, self._files, sums)

    def _take(self, padded: int) -> list[ExtentPart]:
        """Pieces on disk for ``padded`` bytes that are known to be free. The lock is held."""
        shares = self._shares(padded)
        pieces = []
        for index, share in enumerate(shares):
            taken = self._free[index].take(share) if share else []
            if taken is None:
                raise AssertionError(f"share {share} of path {index} exceeds its free bytes")
            pieces += [ExtentPart(index, offset, nbytes) for offset, nbytes in taken]
        return pieces

    def _shares(self, padded: int) -> list[int]:
        """How many bytes of an extent each path gets, at most what it has free."""
        if padded < 2 * STRIPE_MIN_BYTES or len(self.paths) == 1:
            # Whole, where relatively most is free; in parts only when it fits nowhere whole.
            order = sorted(range(len(self.paths)), key=lambda index: self._free[index].used_bytes / self.weights[index])
            for index in order:
                if self._free[index].free_bytes >= padded:
                    return [padded if at == index else 0 for at in range(len(self.paths))]
        shares = split_by_weight(padded, self.weights, STRIPE_MIN_BYTES)
        shares = [min(share, free.free_bytes) for share, free in zip(shares, self._free, strict=True)]
        left = padded - sum(shares)
        for index, free in enumerate(self._free):
            more = min(left, free.free_bytes - shares[index])
            shares[index] += more
            left -= more
        return shares

    def _grow(self, missing: int) -> None:
        """Adds at least ``missing`` bytes of capacity, within budget and free space. The lock is held."""
        allowed = (
            None if self.budget_bytes is None else self.budget_bytes // PAGE_BYTES * PAGE_BYTES - self.capacity_bytes
        )
        if allowed is not None and missing > allowed:
            raise BudgetError(
                f"nvme_budget: {missing} more bytes are needed on {', '.join(self.paths)}, but of the budget of "
                f"{self.budget_bytes} bytes {max(0, allowed)} are left ({self.used_bytes} are used). Raise nvme_budget."
            )
        wanted = round_up(missing, GROW_STEP_BYTES)
        if allowed is not None:
            wanted = min(wanted, allowed)
        for index, share in enumerate(self._growth_shares(wanted, missing)):
            if share:
                self._grow_file(index, share)

    def _growth_shares(self, wanted: int, missing: int) -> list[int]:
        rooms: dict[int, int] = {}
        for path, file in zip(self.paths, self._files, strict=True):
            rooms.setdefault(file.device, max(0, free_bytes(path) - SPACE_MARGIN_BYTES) // PAGE_BYTES * PAGE_BYTES)
        available = sum(rooms.values())
        if missing > available:
            raise BudgetError(
                f"{self._key}: {missing} more bytes are needed on {', '.join(self.paths)}, but only {available} are "
                f"free there (after a margin of {SPACE_MARGIN_BYTES} bytes per file system). Free space, name another "
                "path, or give more host_budget."
            )
        target = split_by_weight(self.capacity_bytes + min(wanted, available), self.weights, PAGE_BYTES)
        shares = [0] * len(self.paths)
        left = min(wanted, available)
        # First towards the proportion of the weights, then to any file with room.
        for limit in (True, False):
            for index, file in enumerate(self._files):
                goal = target[index] - self._free[index].capacity_bytes - shares[index] if limit else left
                more = max(0, min(goal, left, rooms[file.device]))
                shares[index] += more
                rooms[file.device] -= more
                left -= more
        return shares

    def _grow_file(self, index: int, share: int) -> None:
        size = self._free[index].capacity_bytes + share
        path = self.paths[index]
        try:
            self._files[index].grow(size)
        except IoFailure as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise BudgetError(
                f"{self._key}: {path}: {share} more bytes cannot be allocated, {free_bytes(path)} "
                f"are free: {failure.strerror}. Free space, name another path, or give more host_budget."
            ) from failure
        self._free[index].extend(size)

    def __enter__(self) -> SwapSpace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
