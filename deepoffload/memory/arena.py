"""One mapping of exactly the budgeted bytes, and the allocator over it.

Everything that deepoffload manages in host memory lives in this mapping, so the budget cannot be exceeded: there is no
other memory to take. Blocks of two lifetimes share it (unit weights and gradients, and the pieces of optimizer state),
so the allocator is two-ended: one kind grows from the low end, the other from the high end, which keeps holes of like
sizes together. The memory of a device has the same allocator.

Memory that the program refers to cannot be moved, so free bytes may lie in pieces for good. Host memory is pages, and
only their addresses have to lie together: the arena has spare addresses, and :meth:`Arena.lend` gives them the memory
of the pieces. So a block fits if its bytes do.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from deepoffload.errors import BudgetError
from deepoffload.native.aio import PAGE_BYTES, HostMapping, ffi, round_up


def common_size(sizes: Iterable[int]) -> int | None:
    """The size that more than half of the bytes come in, if there is one."""
    bytes_in: Counter[int] = Counter()
    for nbytes in sizes:
        bytes_in[nbytes] += nbytes
    size, nbytes = max(bytes_in.items(), key=lambda item: item[1], default=(0, 0))
    return size if 2 * nbytes > bytes_in.total() else None


class Ranges:
    """A page-granular, two-ended allocator: it hands out offsets and knows nothing of what lies there.

    Args:
        capacity_bytes: rounded *down* to whole pages, so that the budget holds.
        key: of the configuration, for the error.

    Raises:
        BudgetError: less than a page.
    """

    def __init__(self, capacity_bytes: int, key: str) -> None:
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        if not self.capacity_bytes:
            raise BudgetError(
                f"a budget of {capacity_bytes} bytes is less than a page of memory ({PAGE_BYTES} bytes): raise "
                f"{key} (was a unit forgotten, as in '2GiB'?)"
            )
        self._hole_starts: list[int] = [0]
        self._hole_sizes: dict[int, int] = {0: self.capacity_bytes}
        self._used: dict[int, int] = {}
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def whole_bytes(self, granule_bytes: int) -> int:
        """Free bytes in whole parts of ``granule_bytes``: the splinters next to them are of no use."""
        return sum(size - size % granule_bytes for size in self._hole_sizes.values())

    def allocate(self, nbytes: int, *, high: bool = False) -> int | None:
        """Offset of a new range of at least ``nbytes`` in the best fitting hole, or None when no hole is large enough.

        ``high`` takes the upper end of the hole (and the highest of equally good holes).
        """
        size = round_up(max(nbytes, 1))
        best = -1
        best_size = self.capacity_bytes + 1
        for start in reversed(self._hole_starts) if high else self._hole_starts:
            hole = self._hole_sizes[start]
            if size <= hole < best_size:
                best, best_size = start, hole
                if hole == size:
                    break
        if best < 0:
            return None
        offset = best + best_size - size if high else best
        self._take(best, best_size, offset, size)
        return offset

    def _take(self, hole: int, hole_size: int, offset: int, size: int) -> None:
        self._remove_hole(hole)
        if offset > hole:
            self._add_hole(hole, offset - hole)
        if offset + size < hole + hole_size:
            self._add_hole(offset + size, hole + hole_size - offset - size)
        self._used[offset] = size
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free(self, offset: int) -> None:
        """Give a range back; it merges with the holes next to it."""
        size = self._used.pop(offset)
        self.used_bytes -= size
        start, end = offset, offset + size
        index = bisect.bisect_left(self._hole_starts, offset)
        if index < len(self._hole_starts) and self._hole_starts[index] == end:
            end += self._hole_sizes[end]
            self._remove_hole(offset + size)
        if index > 0:
            before = self._hole_starts[index - 1]
            if before + self._hole_sizes[before] == offset:
                start = before
                self._remove_hole(before)
        self._add_hole(start, end - start)

    def shrink(self, offset: int, nbytes: int) -> None:
        """Give back what a used range has beyond ``nbytes`` (of which a page stays at least)."""
        size, kept = self._used[offset], round_up(max(nbytes, 1))
        if kept < size:
            self._used[offset], self._used[offset + kept] = kept, size - kept
            Ranges.free(self, offset + kept)

    def layout(self) -> list[tuple[int, int, bool]]:
        """(offset, bytes, used) of every range and hole, in address order."""
        parts = [(offset, size, True) for offset, size in self._used.items()]
        parts += [(offset, size, False) for offset, size in self._hole_sizes.items()]
        return sorted(parts)

    def slide_down(self, offset: int) -> int | None:
        """Where a used range would go if it slid into the hole right below it (the hole moves up), or None.

        The caller moves the bytes with memmove semantics *after* this call returns the new offset; the two may overlap.
        """
        index = bisect.bisect_left(self._hole_starts, offset)
        if index == 0:
            return None
        hole = self._hole_starts[index - 1]
        if hole + self._hole_sizes[hole] != offset:
            return None
        size = self._used[offset]
        self.free(offset)
        start = hole
        self._take(start, self._hole_sizes[start], start, size)
        return start

    def size_of(self, offset: int) -> int:
        """Bytes of the used range at ``offset`` (whole pages)."""
        return self._used[offset]

    def _add_hole(self, start: int, size: int) -> None:
        bisect.insort(self._hole_starts, start)
        self._hole_sizes[start] = size

    def _remove_hole(self, start: int) -> None:
        self._hole_starts.pop(bisect.bisect_left(self._hole_starts, start))
        del self._hole_sizes[start]


SPARE_SHARE = 4
"""Spare addresses, in parts of the budget. They may fall into pieces, too."""

_HUGE_BYTES = 2 << 20


class Arena(Ranges):
    """Host memory: the allocator over one :class:`HostMapping` of ``capacity_bytes``.

    Args:
        lends: False where every page has to stay where it is (a device's driver knows it by its address).
        budget_of: one rank's budget that leaves an arena so many bytes, for errors; all of it is the arena's where that
            is not said.
        sharers: ranks of a host, which share its budget.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        lends: bool = True,
        budget_of: Callable[[int], int] | None = None,
        sharers: int = 1,
    ) -> None:
        super().__init__(capacity_bytes, "host_budget")
        self.lends = lends
        self.sharers = sharers
        self.budget_of: Callable[[int], int] = int if budget_of is None else budget_of
        # On a page border of the largest kind: no such page may reach from the budget's memory into the spare.
        self._spare_start = round_up(self.capacity_bytes, _HUGE_BYTES)
        behind_bytes = self._spare_start - self.capacity_bytes
        spare_bytes = behind_bytes + SPARE_SHARE * self.capacity_bytes if lends else 0
        mapping = HostMapping(self.capacity_bytes, spare=spare_bytes)
        self.address = mapping.address
        self.mapped_bytes = mapping.nbytes + mapping.spare_bytes
        self._mapping = mapping
        self._spare = Ranges(mapping.spare_bytes - behind_bytes, "host_budget") if mapping.spare_bytes else None
        self._borrowed: dict[int, list[int]] = {}
        # Tensors and views over it keep the buffer; when the last of them goes, so does the mapping.
        self.buffer: Any = ffi.buffer(ffi.cast("char *", self.address), self.mapped_bytes)
        self._before_release: list[Callable[[], None]] = []
        weakref.finalize(self.buffer, _release, mapping, self._before_release).atexit = False

    def host_budget_of(self, nbytes: int) -> int:
        """The host's budget that leaves each rank's arena so many bytes."""
        return self.budget_of(nbytes) * self.sharers

    def give_back_holes(self) -> int:
        """Give the memory of holes back to the system until it is used again. Returns how many bytes. Whole huge pages
        only: what is cut into small ones stays so, and the disk is slower then.

        Nothing where pages have to stay where they are.
        """
        given = 0
        for start, nbytes in self._hole_sizes.items() if self.lends else ():
            first = round_up(self.address + start, _HUGE_BYTES) - self.address
            whole = (self.address + start + nbytes) // _HUGE_BYTES * _HUGE_BYTES - self.address - first
            if whole > 0 and self._mapping.forget(first, whole):
                given += whole
        return given

    def lend(self, nbytes: int) -> int | None:
        """Offset of a range at spare addresses, with the memory of so many bytes of holes, which are in use until it is
        freed; None when less is free, or the system does not let pages go.

        It costs system calls, and the pages are new ones: for where nothing else helps.
        """
        size = round_up(max(nbytes, 1))
        if self._spare is None or self.free_bytes < size:
            return None
        spare = self._spare.allocate(size)
        if spare is None:
            return None
        offset = self._spare_start + spare
        parts: list[int] = []
        left = size
        for start, hole_bytes in sorted(self._hole_sizes.items(), key=lambda hole: hole[1]):
            taken = min(hole_bytes, left)
            if not self._mapping.forget(start, taken):
                break
            self._take(start, hole_bytes, start, taken)
            parts.append(start)
            left -= taken
            if not left:
                break
        if left or not self._mapping.open_spare(offset, size):
            for start in parts:
                super().free(start)
            self._spare.free(spare)
            return None
        self._borrowed[offset] = parts
        return offset

    def free(self, offset: int) -> None:
        parts = self._borrowed.pop(offset, None)
        if parts is None or self._spare is None:
            super().free(offset)
            return
        self._mapping.close_spare(offset, self._spare.size_of(offset - self._spare_start))
        self._spare.free(offset - self._spare_start)
        for start in parts:
            super().free(start)

    def shrink(self, offset: int, nbytes: int) -> None:
        if offset not in self._borrowed:  # nothing would come together
            super().shrink(offset, nbytes)

    def size_of(self, offset: int) -> int:
        if self._spare is not None and offset in self._borrowed:
            return self._spare.size_of(offset - self._spare_start)
        return super().size_of(offset)

    def memory_of(self, offset: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the memory that a range has: its own, or the holes that it borrows."""
        parts = self._borrowed.get(offset)
        return [(start, Ranges.size_of(self, start)) for start in ([offset] if parts is None else parts)]

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return 0 <= address - self.address < self.mapped_bytes

    def before_release(self, call: Callable[[], None]) -> None:
        """Have ``call`` made before the mapping goes, whenever that is."""
        self._before_release.append(call)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of a range; the view keeps the mapping alive."""
        return memoryview(self.buffer)[offset : offset + nbytes]

    def close(self) -> None:
        """Drop the mapping; its memory goes when the last tensor that still shows a part of it goes. Idempotent."""
        self.buffer = None


def _release(mapping: HostMapping, before: list[Callable[[], None]]) -> None:
    for call in before:
        call()
    mapping.close()
