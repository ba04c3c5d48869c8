"""Copies of weights in a mapped file without a name, for code that wants an address or a storage.

A weight keeps its address for the life of the engine, so that addresses tell weights apart as in plain PyTorch. The
pages are the page cache's, not the process's: all weights of a model may be mapped at once. A copy that nobody holds
any more gives its room on the disk back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import IoFailure
from deepoffload.native.aio import round_up
from deepoffload.params.torch_private import get_data, outside_user_modes, version_of
from deepoffload.params.unit import ParamHandle


class MappedCopy:
    """The copy of one weight. It lives as long as somebody asks for its address.

    Attributes:
        tensor: has its own storage, which keeps the memory.
    """

    def __init__(self, handle: ParamHandle, memory: memoryview) -> None:
        self._handle = handle
        self._version: int | None = None
        with outside_user_modes():
            flat = torch.frombuffer(memory, dtype=handle.dtype, count=handle.numel)
            self.tensor = flat.as_strided(handle.shape, handle.stride)

    def refresh(self, weight: nn.Parameter) -> Tensor:
        """The copy, brought up to date."""
        handle = self._handle
        handle.pager.catch_up(handle.unit)
        version = version_of(weight)
        if version != self._version or handle.escape_crc is not None:
            with outside_user_modes():
                handle.pager.pin(handle)
                try:
                    self.tensor.copy_(get_data(weight))
                finally:
                    handle.pager.unpin(handle)
            self._version = version
        return self.tensor


class Place:
    """Where in a file one copy is.

    Attributes:
        memory: the mapped bytes, while a storage uses them.
    """

    __slots__ = ("file", "start", "nbytes", "memory")

    def __init__(self, file: _File, start: int, nbytes: int) -> None:
        self.file = file
        self.start = start
        self.nbytes = nbytes
        self.memory: weakref.ref[memoryview] | None = None

    def in_use(self) -> memoryview | None:
        return None if self.memory is None else self.memory()


class _File:
    """A file with holes only, mapped as a whole."""

    __slots__ = ("file", "memory")

    def __init__(self, directory: str, nbytes: int) -> None:
        self.file = tempfile.TemporaryFile(dir=directory, prefix="deepoffload-")
        os.ftruncate(self.file.fileno(), nbytes)
        self.memory = mmap.mmap(self.file.fileno(), nbytes)


class MappedCopies:
    """All copies of one engine's weights. To be called under the engine's lock.

    Args:
        directory: where the file is made; None for the system's directory of temporary files.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._places: weakref.WeakKeyDictionary[ParamHandle, Place] = weakref.WeakKeyDictionary()
        self._unused: deque[Place] = deque()

    def of(self, handle: ParamHandle) -> MappedCopy:
        """The copy of a weight, made when there is none."""
        self.give_room_back()
        known = handle.mapped_copy() if handle.mapped_copy is not None else None
        if known is None:
            known = MappedCopy(handle, self._memory(handle))
            handle.mapped_copy = weakref.ref(known)
        return known

    @property
    def directory(self) -> str:
        return self._directory or tempfile.gettempdir()

    def _memory(self, handle: ParamHandle) -> memoryview:
        remedy = (
            "torch.save and safetensors need room for a copy of the weights where the swap files are (else in TMPDIR)"
        )
        if handle not in self._places:
            self._find_places(handle, remedy)
        return self.memory(self._places[handle], handle.pager.lock, handle.name, remedy)

    def memory(self, place: Place, lock: Any, name: str, remedy: str) -> memoryview:
        """The mapped bytes of a place: those that somebody still uses, or new ones.

        Args:
            lock: the engine's. name, remedy: for the error.

        Raises:
            IoFailure: the disk is full.
        """
        memory = place.in_use()
        if memory is None:
            with self._room_for(name, place.nbytes, remedy):
                # A full disk shows here, not as SIGBUS.
                os.posix_fallocate(place.file.file.fileno(), place.start, place.nbytes)
            memory = memoryview(place.file.memory)[place.start : place.start + place.nbytes]
            place.memory = weakref.ref(memory)
            weakref.finalize(memory, _died, weakref.ref(lock), self._unused, place).atexit = False
        return memory

    @contextlib.contextmanager
    def _room_for(self, name: str, nbytes: int, remedy: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"reserving a copy of {name}"
            raise IoFailure(what, error.errno or 0, self.directory, 0, nbytes, remedy) from error

    def _find_places(self, handle: ParamHandle, remedy: str) -> None:
        """Give every weight that has none a place, in one file: a process may open only so many."""
        handles: dict[ParamHandle, None] = {handle: None}
        for unit in handle.pager.units:
            handles.update((other, None) for other in unit.handles if other not in self._places)
        places = self.places([each.nbytes for each in handles], handle.name, remedy)
        self._places.update(zip(handles, places, strict=True))

    def places(self, sizes_bytes: Sequence[int], name: str, remedy: str) -> list[Place]:
        """Room for copies of these sizes, in one new file, which takes none on the disk yet.

        Raises:
            IoFailure: the file cannot be made; ``name`` and ``remedy`` are for the error.
        """
        starts, end = [], 0
        for nbytes in sizes_bytes:
            starts.append(end)
            end += round_up(nbytes, mmap.PAGESIZE)
        with self._room_for(name, end, remedy):
            file = _File(self.directory, end)
        return [
            Place(file, start, round_up(nbytes, mmap.PAGESIZE))
            for nbytes, start in zip(sizes_bytes, starts, strict=True)
        ]

    def give_room_back(self) -> None:
        """Punch holes into the file where no storage is any more."""
        _punch(self._unused)


def _died(lock: Any, unused: deque[Place], place: Place) -> None:
    """A copy's storage has gone. May run at any time, in any thread."""
    unused.append(place)
    held = lock()
    if held is not None and held.acquire_idle():
        try:
            _punch(unused)
        finally:
            held.release()


def _punch(unused: deque[Place]) -> None:
    while unused:
        place = unused.popleft()
        if place.in_use() is None:
            with contextlib.suppress(OSError):  # a file system without holes: the room comes back with the engine's end
                place.file.memory.madvise(mmap.MADV_REMOVE, place.start, place.nbytes)
