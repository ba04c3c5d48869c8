"""Writes what ``torch.load(weights_only=True)`` reads, tensor by tensor: no tensor is whole in memory.

``torch.save`` needs the bytes of every tensor at an address. Here the description (``data.pkl``) is pickled first, with
each tensor's shape only, and the storages follow piece by piece. The format is
https://docs.pytorch.org/docs/stable/notes/serialization.html: a ZIP archive without compression, whose records begin at
multiples of 64 bytes, so that ``torch.load(mmap=True)`` maps them.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from deepoffload.checkpoint.convert.tensors import (
    Held,
    Values,
    bytes_of,
    nbytes_of,
    numel_of,
    pieces_of,
    row_major_stride,
)
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.errors import IoFailure, UnsupportedError
from deepoffload.params.torch_private import rebuild_tensor

_ALIGNMENT_BYTES = 64
_HEADER_BYTES = 30
_WIDE_FIELD_BYTES = 20
_PADDING_TAG = b"FB"
_PROTOCOL = 2

_STORAGE_TYPES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}

Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Streamed:
    """A tensor in a value that :func:`write_torch_file` writes. The same object in two places is one tensor there."""

    values: Values


@dataclass(frozen=True)
class _Referred:
    kind: type
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Puts references to storages in the place of tensors, and remembers the order of the storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.streamed: list[Streamed] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is _Referred:
            return ("storage", value.kind, value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = Streamed(Held(value))
        if type(value) is not Streamed:
            return NotImplemented
        values = value.values
        if values.dtype not in _STORAGE_TYPES:
            raise UnsupportedError(f"a tensor of {values.dtype} cannot be written to a torch file piece by piece")
        storage = _Referred(_STORAGE_TYPES[values.dtype], str(len(self.streamed)), numel_of(values))
        self.streamed.append(value)
        shape = tuple(values.shape)
        return rebuild_tensor, (storage, 0, shape, row_major_stride(shape), False, OrderedDict())


def write_torch_file(path: str, value: Any, progress: Progress) -> None:
    """Write a new file. The context that made its folder puts it on the disk.

    Args:
        value: dicts, lists, tuples, numbers, texts, tensors, and :class:`Streamed` tensors.
        progress: told the bytes of each piece that was written.

    Raises:
        IoFailure: the disk is full or failed. UnsupportedError: a type of tensor that has no storage type.
    """
    try:
        with open(path, "xb") as file:
            write_archive(file, value, progress)
    except IoFailure:
        raise
    except OSError as error:
        raise failure("writing", error, path, 0) from error


def write_archive(file: BinaryIO, value: Any, progress: Progress) -> int:
    """Write one archive at the present position of a file; its length in bytes."""
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(value)
    target = _FromHere(file)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write_small(archive, target, "data.pkl", described.getvalue())
        _write_small(archive, target, "byteorder", b"little")
        for number, streamed in enumerate(pickler.streamed):
            nbytes = nbytes_of(streamed.values)
            with archive.open(_record(target, f"data/{number}", nbytes), "w") as record:
                for piece in pieces_of(streamed.values):
                    record.write(bytes_of(piece))
                    progress(piece.nbytes)
        _write_small(archive, target, "version", b"3\n")
    return target.tell()


def _write_small(archive: zipfile.ZipFile, target: _FromHere, name: str, data: bytes) -> None:
    with archive.open(_record(target, name, len(data)), "w") as record:
        record.write(data)


def _record(target: _FromHere, name: str, nbytes: int) -> zipfile.ZipInfo:
    """A record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = nbytes
    wide = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    header = target.tell() + _HEADER_BYTES + len(info.filename) + (_WIDE_FIELD_BYTES if wide else 0) + 4
    padding = -header % _ALIGNMENT_BYTES
    info.extra = _PADDING_TAG + padding.to_bytes(2, "little") + b"Z" * padding
    return info


class _FromHere:
    """A file whose positions count from where it stood: an archive in it refers to its own beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begin = file.tell()

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + self._begin if whence == os.SEEK_SET else offset, whence) - self._begin

    def flush(self) -> None:
        self._file.flush()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """The file is its owner's."""
