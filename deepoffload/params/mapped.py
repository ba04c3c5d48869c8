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
            handle.pager.pin(handle)
            try:
                with outside_user_modes():
                    self.tensor.copy_(get_data(weight))
            finally:
                handle.pager.unpin(handle)
            self._version = version
        return self.tensor


class _Place:
    """Where in a file the copy of one weight is.

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
        self._places: weakref.WeakKeyDictionary[ParamHandle, _Place] = weakref.WeakKeyDictionary()
        self._unused: deque[_Place] = deque()

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
        try:
            if handle not in self._places:
                self._find_places(handle)
            place = self._places[handle]
            memory = place.in_use()
            if memory is None:
                # A full disk shows here, not as SIGBUS.
                os.posix_fallocate(place.file.file.fileno(), place.start, place.nbytes)
                memory = memoryview(place.file.memory)[place.start : place.start + handle.nbytes]
                place.memory = weakref.ref(memory)
                weakref.finalize(memory, _died, weakref.ref(handle.pager.lock), self._unused, place).atexit = False
            return memory
        except OSError as error:
            remedy = "torch.save and safetensors need room for a copy of the weights on nvme_path (else in TMPDIR)"
            raise IoFailure(
                f"reserving a copy of {handle.name}", error.errno or 0, self.directory, 0, handle.nbytes, remedy
            ) from error

    def _find_places(self, handle: ParamHandle) -> None:
        """Give every weight that has none a place, in one file: a process may open only so many."""
        handles: dict[ParamHandle, None] = {handle: None}
        for unit in handle.pager.units:
            handles.update((other, None) for other in unit.handles if other not in self._places)
        starts, end = [], 0
        for each in handles:
            starts.append(end)
            end += round_up(each.nbytes, mmap.PAGESIZE)
        file = _File(self.directory, end)
        for each, start in zip(handles, starts, strict=True):
            self._places[each] = _Place(file, start, round_up(each.nbytes, mmap.PAGESIZE))

    def give_room_back(self) -> None:
        """Punch holes into the file where no storage is any more."""
        _punch(self._unused)


def _died(lock: Any, unused: deque[_Place], place: _Place) -> None:
    """A copy's storage has gone. May run at any time, in any thread."""
    unused.append(place)
    held = lock()
    if held is not None and held.acquire_idle():
        try:
            _punch(unused)
        finally:
            held.release()


def _punch(unused: deque[_Place]) -> None:
    while unused:
        place = unused.popleft()
        if place.in_use() is None:
            with contextlib.suppress(OSError):  # a file system without holes: the room comes back with the engine's end
                place.file.memory.madvise(mmap.MADV_REMOVE, place.start, place.nbytes)
