"""What a swap space with named files keeps when the process dies: the last durable step.

A step is durable when its extents are written, every file is synced, and a *record* that names them is written and
synced, too, in one of two places in turn. Extents of the last durable step are held, so that nothing of it is ever
overwritten; they become free when a newer step is durable. This is LMDB's way with two meta pages
(http://www.lmdb.tech/doc/, "Crash consistency"): at every moment at least one place names a step that is whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deepoffload.errors import BudgetError, IoFailure, UsageError
from deepoffload.io.checksums import crc32c_of
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.extents import Extent
from deepoffload.io.header_pages import MARK_PAGE, SLOT_PAGES, Mark, read_at, write_at
from deepoffload.io.step_record import PARTS_MAX, Slot, StoredExtent, body_of, check_extent, parse_body
from deepoffload.io.swap_space import SwapSpace
from deepoffload.native.aio import PAGE_BYTES

BODY_BYTES_MAX = 1 << 32
"""A slot that names a longer body is damaged."""


@dataclass(frozen=True)
class DurableStep:
    """What a record says.

    Attributes:
        step: optimizer steps before it.
        extents: that it consists of.
        content: what :meth:`DurableStore.publish` was given.
        chunk_bytes: checksums begin again after so many bytes of each part.
    """

    step: int
    extents: Sequence[StoredExtent]
    content: bytes
    chunk_bytes: int


def newest_slot(engine: IoEngine, file: IoFile) -> tuple[list[Slot | None], Slot | None]:
    """Both places of the record in the first path's file, and the newer one of those that are whole.

    Raises:
        UsageError: both are damaged, or a newer version wrote them.
    """
    pages = [read_at(engine, file, number * PAGE_BYTES, PAGE_BYTES) for number in SLOT_PAGES]
    slots = [Slot.of(page) for page in pages]
    newest = max((slot for slot in slots if slot is not None), key=lambda slot: slot.sequence, default=None)
    if newest is None and all(any(page) for page in pages):
        raise UsageError(
            f"{file.path}: both records of the durable state are damaged. Resume from a checkpoint; remove the file to "
            "give this state up"
        )
    return slots, newest


def read_body(engine: IoEngine, files: Sequence[IoFile], slot: Slot) -> DurableStep:
    """The record that a slot names.

    Raises:
        UsageError: it is damaged.
    """
    path = files[0].path
    try:
        check_extent(slot.body)
        inside = all(
            part.path_index < len(files) and part.offset + part.nbytes <= files[part.path_index].size_at_open
            for part in slot.body.pieces
        )
        if slot.body.nbytes > BODY_BYTES_MAX or not inside:
            raise ValueError("it lies outside of the files")
    except ValueError as error:
        raise UsageError(f"{path}: the record of step {slot.step} is damaged: {error}") from None
    parts = [read_at(engine, files[part.path_index], part.offset, part.nbytes) for part in slot.body.pieces]
    body = b"".join(parts)[: slot.body.nbytes]
    if crc32c_of(body) != slot.body_sum:
        raise UsageError(
            f"{path}: the record of step {slot.step} is damaged (its checksum is wrong), and what the one before it "
            "names may be overwritten. Resume from a checkpoint; remove the file to give this state up"
        )
    extents, content, chunk_bytes = parse_body(body)
    return DurableStep(slot.step, extents, content, chunk_bytes)


@dataclass
class _Record:
    """What is in a place: a step, and the extents that are held for it."""

    step: int
    extents: list[Extent]


class DurableStore:
    """The records of a swap space with named files.

    `[Note: steps of several ranks]` Each rank has its own store, and what resumes is a step that all of them have. So a
    rank keeps the step before, too, until it hears that all have the newest one (:meth:`confirm`). A newer step never
    overwrites a confirmed one. After a death at any moment the ranks have a step in common: the last confirmed one, or
    the one after it where all were fast enough. Before the first is confirmed, some of them may have it alone.

    Args:
        shared: several ranks make steps durable together; else each step is confirmed at once.

    Attributes:
        found: the newest step that an earlier run has left, until a newer one is durable; None where there is none.
        left: all that it has left, by step: with several ranks there may be two.
        step: the last one that is durable; None where there is none.
        sync_s: seconds that the longest sync for the last step took.

    Raises:
        UsageError: the files do not belong together, or both records are damaged.
        IoFailure: a file cannot be read.
    """

    def __init__(self, space: SwapSpace, *, shared: bool = False) -> None:
        self._space = space
        self._shared = shared
        self._places: dict[int, _Record] = {}
        self._undecided: list[Extent] = []
        self._failed: IoFailure | None = None
        self._marked = False
        self._newest: int | None = None
        self._confirmed: int | None = None  # the place that is not written to
        self._sequence = 0
        self.sync_s = 0.0
        self.left: dict[int, DurableStep] = {}
        self._named = [_identity(file.path) for file in space.files]
        slots, newest = newest_slot(space.engine, space.files[0])
        marks = [self._mark_of(file, newest) for file in space.files]
        self._check_together(newest, marks)
        # What was begun and never became durable is continued: so all files agree at every moment.
        self._store = marks[0].store if marks[0] is not None else secrets.token_bytes(16)
        if newest is not None:
            self._recover(newest, slots.index(newest))
            older = slots[1 - slots.index(newest)]
            if shared and older is not None and older.store == newest.store:
                self._recover_older(older, 1 - slots.index(newest))

    @property
    def step(self) -> int | None:
        return None if self._newest is None else self._places[self._newest].step

    @property
    def found(self) -> DurableStep | None:
        return self.left[max(self.left)] if self.left else None

    @property
    def is_first(self) -> bool:
        """Whether the newest step is the first that ever was: perhaps no other rank has it."""
        return self._sequence == 1

    # -- opening ---------------------------------------------------------------------------------------------------

    def _mark_of(self, file: IoFile, newest: Slot | None) -> Mark | None:
        page = read_at(self._space.engine, file, MARK_PAGE * PAGE_BYTES, PAGE_BYTES)
        mark = Mark.of(page)
        if mark is None and newest is not None and any(page):  # without a step it may be torn
            raise UsageError(
                f"{file.path} is damaged at offset {MARK_PAGE * PAGE_BYTES}, where it says which files belong "
                "together. Resume from a checkpoint; remove the file to give this state up"
            )
        return mark

    def _check_together(self, newest: Slot | None, marks: Sequence[Mark | None]) -> None:
        """Raise UsageError where the files are not those that made the state together, in the same order."""
        for index, mark in enumerate(marks):
            first = marks[0].store if marks[0] is not None else None
            if mark is None and newest is None:
                continue  # nothing was ever durable there
            expected = first if newest is None else newest.store
            if mark is not None and mark.store == expected and mark.index == index and len(mark.paths) == len(marks):
                continue
            known = mark if mark is not None else marks[0]
            raise UsageError(
                f"durability: {self._space.files[index].path} does not belong to the durable state of the other paths"
                f" (it was made with {', '.join(known.paths) if known is not None else 'other paths'}); name the same "
                "paths in the same order, or remove the files to give that state up"
            )

    def _recover(self, slot: Slot, place: int) -> None:
        found = read_body(self._space.engine, self._space.files, slot)
        held = [slot.body, *(stored.extent for stored in found.extents)]
        if not all(map(self._space.claim, held)):
            raise UsageError(f"{self._space.files[0].path}: the record of step {slot.step} is damaged: extents overlap")
        self._places[place] = _Record(slot.step, held)
        self.left[slot.step] = found
        self._sequence, self._newest, self._confirmed, self._marked = slot.sequence, place, place, True

    def _recover_older(self, slot: Slot, place: int) -> None:
        """The step before, as far as it is still there: what was confirmed has let it go, and has perhaps overwritten
        it. Then it is on no rank the newest one that all have."""
        assert self._newest is not None
        try:
            found = read_body(self._space.engine, self._space.files, slot)
        except UsageError:
            return
        held: list[Extent] = []
        known = set(self._places[self._newest].extents)
        for extent in (slot.body, *(stored.extent for stored in found.extents)):
            if extent in known:
                self._space.hold(extent)
            elif not self._space.claim(extent):
                self._free(held)
                return
            held.append(extent)
        self._places[place] = _Record(slot.step, held)
        self.left[slot.step] = found

    def choose(self, step: int) -> None:
        """Go on from a step that an earlier run has left, and give up the other one.

        Raises:
            IoFailure: the disk failed; both may still be there.
        """
        place = next(place for place, record in self._places.items() if record.step == step)
        if place != self._newest and self._newest is not None:
            self._erase(self._newest)
        self._newest = place
        self.left = {step: self.left[step]}
        self.confirm()

    # -- making a step durable ---------------------------------------------------------------------------------------

    def publish(self, step: int, extents: Sequence[Extent], content: bytes) -> None:
        """Make a step durable: when this returns it survives a death of the process and a power failure.

        Args:
            extents: all that it consists of, written and not to be written again. Each is held until a newer step
                is durable, and confirmed.

        Raises:
            IoFailure: the disk failed. The step before is durable as ever, and perhaps this one. After a failed sync
                nobody knows what the disk has, and every later call raises, too. So does one after a file was removed.
                BudgetError: no room for the record.
        """
        if self._failed is not None:
            raise IoFailure.about("no step has been made durable since an earlier failure", self._failed)
        self._check_names()
        self.sync_s = 0.0
        space = self._space
        packed = [StoredExtent(extent, space.sums_of(extent)).packed() for extent in extents]
        body = body_of(packed, content, space.engine.block_bytes)
        place = 0 if self._confirmed is None else 1 - self._confirmed
        held: list[Extent] = []
        decided = False
        try:
            held.append(self._write_body(body))
            for extent in extents:
                space.hold(extent)
                held.append(extent)
            self._sync()
            if not self._marked:
                self._write_marks()
            slot = Slot(self._store, self._sequence + 1, step, len(space.files), held[0], crc32c_of(body))
            decided = True
            write_at(space.engine, space.files[0], SLOT_PAGES[place] * PAGE_BYTES, slot.page())
            self._sync(first_only=True)
        except BaseException:
            if decided:
                self._undecided += held  # the place may name this step, or the next record may overwrite it
            else:
                self._free(held)
            raise
        before, self._places[place] = self._places.get(place), _Record(step, held)
        self._sequence, self._newest, self.left = slot.sequence, place, {}
        old, self._undecided = [*([] if before is None else before.extents), *self._undecided], []
        self._free(old)
        if not self._shared:
            self.confirm()

    def confirm(self) -> None:
        """All ranks have the newest step: what is left of the one before may be overwritten."""
        if self._newest is not None:
            self._confirmed = self._newest
            before = self._places.pop(1 - self._newest, None)
            self._free([] if before is None else before.extents)

    def _check_names(self) -> None:
        """What is written to a file that has lost its name is gone with the process."""
        for file, named in zip(self._space.files, self._named, strict=True):
            if named is None or _identity(file.path) != named:
                raise IoFailure(
                    "making a step durable",
                    errno.ENOENT,
                    file.path,
                    0,
                    0,
                    "The file was removed while this run uses it: nothing can be durable there. Save a checkpoint "
                    "(state.save), and start the run again",
                )

    def _write_body(self, body: bytes) -> Extent:
        extent = self._space.allocate(len(body))
        try:
            if len(extent.pieces) > PARTS_MAX:
                raise BudgetError(
                    f"durability: {len(body)} free bytes of the swap files are in {len(extent.pieces)} parts, and a "
                    f"record lies in {PARTS_MAX} at most; raise nvme_budget"
                )
            at = 0
            for part in extent.pieces:
                data = body[at : at + part.nbytes]
                write_at(self._space.engine, self._space.files[part.path_index], part.offset, data)
                at += part.nbytes
        except BaseException:
            self._space.free(extent)
            raise
        return extent

    def _sync(self, *, first_only: bool = False) -> None:
        started = time.perf_counter()
        try:
            if first_only:
                self._space.files[0].sync()
            else:
                self._space.sync()
        except IoFailure as failure:
            self._failed = failure
            raise
        self.sync_s = max(self.sync_s, time.perf_counter() - started)

    def _write_marks(self) -> None:
        """The first file's is there before any other's: one that stands alone belongs to other paths."""
        paths = tuple(self._space.paths)
        for index, file in enumerate(self._space.files):
            write_at(self._space.engine, file, MARK_PAGE * PAGE_BYTES, Mark(self._store, index, paths).page())
            self._sync()
        self._marked = True

    def _free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._space.free(extent)

    # -- giving it up ------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Forget every durable step. Idempotent.

        Raises:
            IoFailure: the disk failed; a step may still be there.
        """
        newest = 0 if self._newest is None else self._newest
        for place in (1 - newest, newest):  # while there is one, it is the newest
            self._erase(place)
        self._newest = self._confirmed = None
        self._sequence = 0
        old = [*self._undecided, *(extent for record in self._places.values() for extent in record.extents)]
        self._places, self._undecided, self.left = {}, [], {}
        self._free(old)

    def _erase(self, place: int) -> None:
        write_at(self._space.engine, self._space.files[0], SLOT_PAGES[place] * PAGE_BYTES, bytes(PAGE_BYTES))
        self._sync(first_only=True)

    def remove_if_empty(self) -> None:
        """Remove the files that hold no step. To be called before they are closed, and nothing after it."""
        if self._newest is None and not self._undecided:
            for file, named in zip(self._space.files, self._named, strict=True):
                with contextlib.suppress(OSError):
                    if named is not None and _identity(file.path) == named:  # else it is another run's
                        os.unlink(file.path)


def _identity(path: str) -> tuple[int, int] | None:
    """Which file a name stands for; None where it stands for none."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino
