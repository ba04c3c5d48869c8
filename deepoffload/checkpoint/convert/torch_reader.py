"""Reads what ``torch.save`` has written, tensor by tensor, with :mod:`pickle_reader`: nothing in the file is run.

The file is a ZIP archive without compression: ``data.pkl`` describes the value, and each storage is a record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepoffload.checkpoint.convert.archive import Archive, ArchiveRecord, ByteSource, damaged, is_intact
from deepoffload.checkpoint.convert.pickle_reader import Name, read_pickle
from deepoffload.checkpoint.convert.tensors import bytes_of
from deepoffload.checkpoint.expressions import slabs
from deepoffload.errors import UsageError

PICKLE_BYTES_MAX = 32 << 20
_DIMS_MAX = 64

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


class StoredStorage:
    """The record of a storage.

    Args:
        entry: its name in the archive. begin: where its bytes begin. of: what the archive is of.
    """

    __slots__ = ("source", "entry", "record", "begin", "dtype", "numel", "_of", "_intact")

    def __init__(
        self, source: ByteSource, entry: str, record: ArchiveRecord, begin: int, dtype: torch.dtype, of: str
    ) -> None:
        self.source = source
        self.entry = entry
        self.record = record
        self.begin = begin
        self.dtype = dtype
        self.numel = record.nbytes // dtype.itemsize
        self._of = of
        self._intact = False

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on. The first call compares the checksum of all of them.

        Raises:
            UsageError: the checksum is wrong, or the file has changed. IoFailure: it cannot be read.
        """
        if not self._intact:
            if not is_intact(self.source, self.begin, self.record):
                raise damaged(self.source, self.entry, self._of + _tensor_in(self.source, self.entry))
            self._intact = True
        self.source.read_into(target, self.begin + offset)


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
            self.storage.read_into(bytes_of(values), start * self.dtype.itemsize)
        return values


class TorchFile:
    """An open file of ``torch.save``.

    Args:
        of: what the file is of, where its value is a part of something; for errors.

    Attributes:
        value: what was saved, with a :class:`TorchTensor` for each tensor and a record for every unknown object.

    Raises:
        UsageError: it is no such file, is damaged, or is too large in what is no tensor.
    """

    def __init__(self, source: ByteSource, of: str = "") -> None:
        self.source = source
        self._of = of
        self._archive = Archive(source)
        pickles = [name for name in self._archive.records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UsageError(f"{source.path} has no data.pkl: it is no file of torch.save")
        self._root = pickles[0].removesuffix("data.pkl")
        order_name = f"{self._root}byteorder"
        order = self._archive.read(order_name, 16) if order_name in self._archive.records else b"little"
        if order != b"little":
            raise UsageError(f"{source.path} was written on a machine with another byte order; save it again there")
        data = self._archive.read(pickles[0], PICKLE_BYTES_MAX)
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

    def _storage(self, identity: Any) -> StoredStorage:
        kind, storage_type, key, _, numel = identity
        if kind != "storage" or type(storage_type) is not Name or storage_type.name not in STORAGE_DTYPES:
            raise ValueError("a storage of an unknown kind")
        if type(key) is not str or type(numel) is not int or numel < 0:
            raise ValueError("a storage without a key")
        dtype = STORAGE_DTYPES[storage_type.name]
        if key not in self._storages:
            entry = f"{self._root}data/{key}"
            record = self._archive.records[entry]
            if record.nbytes < numel * dtype.itemsize:
                raise ValueError(f"a storage of {numel} elements in {record.nbytes} bytes")
            begin = self._archive.begin(entry)
            if begin + record.nbytes > self.source.nbytes:
                raise ValueError("a storage behind the end of the file")
            self._storages[key] = StoredStorage(self.source, entry, record, begin, dtype, self._of)
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


def _tensor_in(source: ByteSource, entry: str) -> str:
    """The keys that lead to the first tensor of an entry, from the value of the file; "" where it is the value."""
    todo: list[tuple[Any, str]] = [(TorchFile(source).value, "")]
    seen: set[int] = set()
    while todo:
        value, name = todo.pop()
        if id(value) in seen:
            continue
        if isinstance(value, TorchTensor) and value.storage.entry == entry:
            return name
        if isinstance(value, (dict, list, tuple)):
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            below = [(item, f"{name}[{key!r}]"[:1000]) for key, item in items if isinstance(item, _HOLDERS)]
            todo += reversed(below)
    return ""


_HOLDERS = (dict, list, tuple, TorchTensor)
