"""Reads what ``torch.save`` has written, tensor by tensor, with :mod:`pickle_reader`: nothing in the file is run.

The file is a ZIP archive without compression: ``data.pkl`` describes the value, and each storage is a record. The
places of the records are taken from the archive's directory, and every length is compared with the file's before
anything is allocated.
"""

from __future__ import annotations

import copy
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepoffload.checkpoint.convert.pickle_reader import Name, read_pickle
from deepoffload.checkpoint.convert.tensors import bytes_of
from deepoffload.checkpoint.expressions import slabs
from deepoffload.checkpoint.manifest import open_plain
from deepoffload.errors import IoFailure, UsageError

PICKLE_BYTES_MAX = 32 << 20
_DIRECTORY_BYTES_MAX = 24 << 20
_RECORDS_MAX = 200_000
_DIMS_MAX = 64
_TAIL_BYTES = (1 << 16) + 22
_END = b"PK\x05\x06"
_END_64 = b"PK\x06\x06"
_LOCAL = b"PK\x03\x04"
_ENTRY = b"PK\x01\x02"
_FULL = 0xFFFFFFFF

STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
NAMED_DTYPES: Mapping[tuple[str, str], torch.dtype] = {
    ("torch", str(dtype).removeprefix("torch.")): dtype
    for dtype in (
        *dict.fromkeys(STORAGE_DTYPES.values()),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class ByteSource:
    """A file, or a part of one. It is open only while it is read: there may be thousands of them.

    Raises:
        UsageError: it is missing, a link, or no ordinary file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.begin = 0
        with self._opened() as descriptor:
            self._identity = _identity(descriptor)
        self.nbytes = self._identity[2]

    def part(self, begin: int, nbytes: int) -> ByteSource:
        """A part of it.

        Raises:
            UsageError: it does not lie in the file.
        """
        if begin < 0 or nbytes < 0 or begin + nbytes > self.nbytes:
            raise UsageError(f"{self.path} has {self.nbytes} bytes; bytes {begin} to {begin + nbytes} are not there")
        made = copy.copy(self)
        made.begin, made.nbytes = self.begin + begin, nbytes
        return made

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that are there.

        Raises:
            UsageError: the file ends before. IoFailure: it cannot be read.
        """
        if offset < 0 or offset + nbytes > self.nbytes:  # before memory is taken for them
            raise UsageError(f"{self.path} is damaged: it refers to bytes behind its end")
        target = bytearray(nbytes)
        self.read_into(memoryview(target), offset)
        return bytes(target)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on; raises as :meth:`read`."""
        if offset < 0 or offset + len(target) > self.nbytes:
            raise UsageError(f"{self.path} is damaged: it refers to bytes behind its end")
        at = self.begin + offset
        with self._opened() as descriptor:
            if _identity(descriptor) != self._identity:
                raise UsageError(f"{self.path} was changed while it was read; start again")
            while target:
                try:
                    count = os.preadv(descriptor, [target], at)
                except OSError as error:
                    remedy = "Copy the file to another disk if it can be read there"
                    raise IoFailure("reading", error.errno or 0, self.path, at, len(target), remedy) from error
                if not count:
                    raise UsageError(f"{self.path} became shorter while it was read")
                target, at = target[count:], at + count

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = open_plain(self.path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class StoredStorage:
    """The record of a storage."""

    source: ByteSource
    begin: int
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class TorchTensor:
    """A tensor in a file, as :class:`~deepoffload.checkpoint.convert.tensors.Values`."""

    storage: StoredStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self, start: int, numel: int) -> Tensor:
        if self._in_order():
            return self._flat(self.offset + start, numel)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        whole = self._flat(self.offset, span).as_strided(self.shape, self.stride)
        return torch.cat([part.reshape(-1) for part in slabs(whole, start, start + numel, 1 << 20)])

    def _in_order(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True

    def _flat(self, start: int, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=self.dtype, device="cpu")
        if numel:
            self.storage.source.read_into(bytes_of(values), self.storage.begin + start * self.dtype.itemsize)
        return values


class TorchFile:
    """An open file of ``torch.save``.

    Attributes:
        value: what was saved, with a :class:`TorchTensor` for each tensor and a record for every unknown object.

    Raises:
        UsageError: it is no such file, is damaged, or is too large in what is no tensor.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        records = _records(source)
        pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UsageError(f"{source.path} has no data.pkl: it is no file of torch.save")
        self._root = pickles[0].removesuffix("data.pkl")
        self._records = records
        self._places: dict[str, int] = {}
        order = self._small("byteorder", 16) if f"{self._root}byteorder" in records else b"little"
        if order != b"little":
            raise UsageError(f"{source.path} was written on a machine with another byte order; save it again there")
        data = self._small("data.pkl", PICKLE_BYTES_MAX)
        self._storages: dict[str, StoredStorage] = {}
        builders = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._typed_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda args: args[0],
            ("torch._utils", "_rebuild_parameter_with_state"): lambda args: args[0],
            ("torch._tensor", "_rebuild_from_type_v2"): self._tensor_with_attributes,
            ("torch", "Size"): lambda args: tuple(args[0]),
        }
        self.value = read_pickle(data, source.path, builders, dict(NAMED_DTYPES), self._storage)

    def _small(self, name: str, limit_bytes: int) -> bytes:
        begin, nbytes = self._records[self._root + name]
        if nbytes > limit_bytes:
            raise UsageError(f"{self.source.path}: {name} has {nbytes} bytes; at most {limit_bytes} are read")
        return self.source.read(self._data_begin(begin), nbytes)

    def _data_begin(self, header: int) -> int:
        """Where the bytes of a record begin: behind its header, whose length the header says."""
        data = self.source.read(header, 30)
        if data[:4] != _LOCAL:
            raise UsageError(f"{self.source.path} is damaged: a record of it has no header")
        name_bytes, extra_bytes = struct.unpack_from("<HH", data, 26)
        return int(header + 30 + name_bytes + extra_bytes)

    def _storage(self, identity: Any) -> StoredStorage:
        kind, storage_type, key, _, numel = identity
        if kind != "storage" or type(storage_type) is not Name or storage_type.name not in STORAGE_DTYPES:
            raise ValueError("a storage of an unknown kind")
        if type(key) is not str or type(numel) is not int or numel < 0:
            raise ValueError("a storage without a key")
        dtype = STORAGE_DTYPES[storage_type.name]
        if key not in self._storages:
            begin, nbytes = self._records[f"{self._root}data/{key}"]
            if nbytes < numel * dtype.itemsize:
                raise ValueError(f"a storage of {numel} elements in {nbytes} bytes")
            place = self._data_begin(begin)
            if place + nbytes > self.source.nbytes:
                raise ValueError("a storage behind the end of the file")
            self._storages[key] = StoredStorage(self.source, place, dtype, nbytes // dtype.itemsize)
        return self._storages[key]

    def _tensor(self, args: Any) -> TorchTensor:
        storage, offset, shape, stride = args[:4]
        return _checked_tensor(storage, storage.dtype, offset, shape, stride)

    def _tensor_with_attributes(self, args: Any) -> TorchTensor:
        function = args[0]
        if type(function) is not Name or function != ("torch._utils", "_rebuild_tensor_v2"):
            raise ValueError("a tensor that is made in an unknown way")
        return self._tensor(args[2])

    def _typed_tensor(self, args: Any) -> TorchTensor:
        storage, offset, shape, stride = args[:4]
        return _checked_tensor(storage, args[6], offset, shape, stride)


def _checked_tensor(storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> TorchTensor:
    if type(storage) is not StoredStorage or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without a storage")
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or len(shape) > _DIMS_MAX or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a tensor with an impossible shape")
    total = storage.numel * storage.dtype.itemsize // dtype.itemsize
    numel = math.prod(shape)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
    if numel > total or last >= max(total, 1):
        raise ValueError("a tensor that its storage does not hold")
    return TorchTensor(storage, dtype, shape, stride, offset)


# -- the archive -----------------------------------------------------------------------------------------------------


def _records(source: ByteSource) -> dict[str, tuple[int, int]]:
    """Where the header of each record begins, and how many bytes the record has."""
    begin, nbytes, count = _directory(source)
    if nbytes > _DIRECTORY_BYTES_MAX or count > _RECORDS_MAX:
        raise UsageError(f"{source.path} has {count} records; at most {_RECORDS_MAX} are read")
    data = source.read(begin, nbytes)
    found: dict[str, tuple[int, int]] = {}
    at = 0
    try:
        for _ in range(count):
            if data[at : at + 4] != _ENTRY:
                raise ValueError("an entry of its directory is none")
            method, packed, size, name_bytes, extra_bytes, comment_bytes, header = struct.unpack_from(
                "<10xH8xIIHHH8xI", data, at
            )
            name = data[at + 46 : at + 46 + name_bytes].decode()
            extra = data[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes]
            size, packed, header = _wide(extra, size, packed, header)
            if method != 0 or packed != size:
                raise ValueError("a record is compressed")
            if name in found or header + size > source.nbytes:
                raise ValueError(f"the record {name[:80]!r} is there twice, or ends behind the file")
            found[name] = (header, size)
            at += 46 + name_bytes + extra_bytes + comment_bytes
    except (struct.error, ValueError) as error:
        raise UsageError(f"{source.path} is damaged, or no file of torch.save ({error})") from None
    return found


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The numbers that do not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = at + 4
            if size == _FULL:
                (size,), wide = struct.unpack_from("<Q", extra, wide), wide + 8
            if packed == _FULL:
                (packed,), wide = struct.unpack_from("<Q", extra, wide), wide + 8
            if header == _FULL:
                (header,) = struct.unpack_from("<Q", extra, wide)
            break
        at += 4 + length
    return size, packed, header


def _directory(source: ByteSource) -> tuple[int, int, int]:
    """Where the archive's directory begins, its bytes, and how many entries it has."""
    tail_bytes = min(source.nbytes, _TAIL_BYTES)
    tail = source.read(source.nbytes - tail_bytes, tail_bytes)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        old = source.nbytes > 2 and source.read(0, 2) == b"\x80\x02"
        hint = ": it has torch's format from before version 1.6; load it there and save it again" if old else ""
        raise UsageError(f"{source.path} is no file of torch.save{hint or ', or was cut off'}")
    count, nbytes, begin = struct.unpack_from("<HII", tail, at + 10)
    if count == 0xFFFF or nbytes == _FULL or begin == _FULL:
        if at < 20:
            raise UsageError(f"{source.path} is damaged: its directory is missing")
        (end_64,) = struct.unpack_from("<Q", tail, at - 20 + 8)
        data = source.read(end_64, 56)
        if data[:4] != _END_64:
            raise UsageError(f"{source.path} is damaged: its directory is missing")
        count, nbytes, begin = struct.unpack_from("<QQQ", data, 32)
    return begin, nbytes, count
