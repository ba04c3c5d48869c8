"""``manifest.json``: what a checkpoint consists of, with checksums. It is written last: a directory with one is whole.

Its first line holds the CRC-32C of all lines behind it. It names every other file with its length and the CRC-32C of
each MiB, and every tensor with its place. A reader begins here, and believes nothing that is not checked: a
manifest may be damaged, or made by anybody.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepoffload.checkpoint.block_pool import num_blocks_of
from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES
from deepoffload.checkpoint.values import parse_json
from deepoffload.errors import IoFailure, UnsupportedError, UsageError
from deepoffload.io.checksums import crc32c_of

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "deepoffload checkpoint"
FORMAT_VERSION = 1

_FIRST_LINE = re.compile(rb'\{"crc32c": "([0-9a-f]{8})",\n')
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
_DIMS_MAX = 64

_MANIFEST_BYTES_MIN, _BYTES_PER_BYTE = 1 << 19, 2
_VALUES_MIN, _BYTES_PER_VALUE = 1 << 16, 4
# What a manifest may have, in bytes and in values, by the bytes of the other files: it is read into memory before it is
# known to be one. That of a tensor of one element has 200 bytes and 15 values, for 120 bytes in another file.


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint; ``sums`` has the CRC-32C of each MiB (an ``array``, because large models have many)."""

    nbytes: int
    sums: Sequence[int]


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, or the part of one that a file holds.

    Attributes:
        dtype: safetensors' name of it.
        shape: of the whole tensor.
        offset, size: which part of it this is, dimension by dimension.
        begin, end: its bytes in the file.
        order: the dimensions from the slowest to the fastest, where that is not their own order: the bytes are those of
            the tensor with its dimensions in this order.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    begin: int
    end: int
    order: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """As the safetensors header has it."""
        return self.size if self.order is None else tuple(self.size[dim] for dim in self.order)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. ``tensors`` are by file and name; ``saved_ns`` counts from 1970."""

    step: int
    saved_ns: int
    written_by: str
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, TensorRecord]]


# -- writing ---------------------------------------------------------------------------------------------------------


def manifest_text(manifest: Manifest) -> bytes:
    """The content of the file."""
    body = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "written_by": manifest.written_by,
        "step": manifest.step,
        "saved_ns": manifest.saved_ns,
        "files": {
            name: {"bytes": record.nbytes, "crc32c": "".join(f"{value:08x}" for value in record.sums)}
            for name, record in manifest.files.items()
        },
        "tensors": {
            file: {name: _tensor_as_json(record) for name, record in tensors.items()}
            for file, tensors in manifest.tensors.items()
        },
    }
    rest = json.dumps(body, ensure_ascii=False, separators=(",", ":"))[1:].encode() + b"\n"
    return b'{"crc32c": "%08x",\n' % crc32c_of(rest) + rest


def _tensor_as_json(record: TensorRecord) -> dict[str, Any]:
    made = {
        "dtype": record.dtype,
        "shape": list(record.shape),
        "offset": list(record.offset),
        "size": list(record.size),
        "bytes": [record.begin, record.end],
    }
    return made if record.order is None else {**made, "order": list(record.order)}


# -- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(directory: str) -> Manifest:
    """The checked manifest of a checkpoint, whose files are all there with the right lengths. Reads nothing else.

    Raises:
        UsageError: there is none, it is damaged, or a file is missing, a link, or of another length.
        UnsupportedError: a newer version of the format. IoFailure: its disk fails.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    others_bytes = _bytes_of_others(directory)
    data = _content(path, _MANIFEST_BYTES_MIN + _BYTES_PER_BYTE * others_bytes)
    if sum(map(data.count, (b",", b"[", b"{"))) > _VALUES_MIN + others_bytes // _BYTES_PER_VALUE:
        raise UsageError(f"{path} has more values than a manifest of the files next to it can have")
    matched = _FIRST_LINE.match(data)
    if matched is None:
        raise UsageError(f"{path} is no manifest of a deepoffload checkpoint, or is damaged in its first line")
    rest = data[matched.end() :]
    if crc32c_of(rest) != int(matched[1], 16):
        raise UsageError(f"{path} is damaged: its checksum is not that of its first line; load another checkpoint")
    manifest = _manifest(parse_json(data, path), path)
    for name, record in manifest.files.items():
        _check_file(os.path.join(directory, name), record.nbytes)
    return manifest


def _bytes_of_others(directory: str) -> int:
    """Bytes of the files that a manifest is about."""
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name != MANIFEST_NAME)
    except OSError as error:
        raise UsageError(f"{directory} cannot be read as a checkpoint ({error.strerror})") from error


def _content(path: str, limit_bytes: int) -> bytes:
    descriptor = open_plain(path)
    with open(descriptor, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length > limit_bytes:
            raise UsageError(f"{path} has {length} bytes, too many for a manifest of the files next to it")
        try:
            return file.read(limit_bytes)
        except OSError as error:
            raise IoFailure("reading", error.errno or 0, path, 0, length) from error


def open_plain(path: str) -> int:
    """A descriptor of an ordinary file, to be read.

    Raises:
        UsageError: it is missing, a link, no ordinary file, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: the checkpoint is not complete; load another one") from None
    except OSError as error:
        why = "it is a link" if os.path.islink(path) else error.strerror
        raise UsageError(f"{path} cannot be read: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is no ordinary file")
    return descriptor


def _check_file(path: str, nbytes: int) -> None:
    descriptor = open_plain(path)
    try:
        length = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if length != nbytes:
        raise UsageError(f"{path} has {length} bytes and had {nbytes} when it was saved; load another checkpoint")


class _Damage(Exception):
    """What is wrong with a manifest; the caller says in which file."""


def _manifest(data: Any, path: str) -> Manifest:
    try:
        if not isinstance(data, dict) or data.get("format") != FORMAT_NAME:
            raise _Damage("it does not say that it is one of a deepoffload checkpoint")
        version = _whole(data.get("version"), "version")
        if version > FORMAT_VERSION:
            raise UnsupportedError(
                f"{path} has version {version} of the format, and this deepoffload reads up to {FORMAT_VERSION}: it "
                f"was written by {str(data.get('written_by'))[:80]}; use that version or a newer one"
            )
        files = {name: _file(name, record) for name, record in _mapping(data.get("files"), "files").items()}
        tensors = {}
        for file, records in _mapping(data.get("tensors"), "tensors").items():
            if file not in files:
                raise _Damage(f"it has tensors of {file[:200]!r}, which is not among its files")
            found = {name: _tensor(name, record) for name, record in _mapping(records, f"tensors of {file}").items()}
            _check_places(file, found, files[file].nbytes)
            tensors[file] = found
        step, saved_ns = _whole(data.get("step"), "step"), _whole(data.get("saved_ns"), "saved_ns")
        return Manifest(step, saved_ns, str(data.get("written_by")), files, tensors)
    except _Damage as damage:
        raise UsageError(f"{path} is damaged: {damage}; load another checkpoint") from None


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Damage(f"{what} is not an object")
    return value


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _Damage(f"{what[:200]} is not a whole number from 0 to 2**63")
    return value


def _wholes(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _DIMS_MAX:
        raise _Damage(f"{what[:200]} is not a list of at most {_DIMS_MAX} numbers")
    return tuple(_whole(item, what) for item in value)


def _file(name: str, record: Any) -> FileRecord:
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise _Damage(f"{name[:200]!r} cannot be the name of a file of it")
    record = _mapping(record, f"the record of {name}")
    nbytes, text = _whole(record.get("bytes"), f"the length of {name}"), record.get("crc32c")
    if not isinstance(text, str) or len(text) != 8 * num_blocks_of(nbytes) or not re.fullmatch("[0-9a-f]*", text):
        raise _Damage(f"the checksums of {name} are not eight hexadecimal digits per MiB")
    return FileRecord(nbytes, array("I", (int(text[at : at + 8], 16) for at in range(0, len(text), 8))))


def _tensor(name: str, record: Any) -> TensorRecord:
    record = _mapping(record, f"the record of {name[:200]!r}")
    dtype = record.get("dtype")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _Damage(f"the dtype of {name[:200]!r} is not known")
    shape, offset, size = (_wholes(record.get(key), f"{key} of {name}") for key in ("shape", "offset", "size"))
    places = _wholes(record.get("bytes"), f"bytes of {name}")
    order = None if record.get("order") is None else _wholes(record["order"], f"order of {name}")
    if not len(shape) == len(offset) == len(size) or any(
        start + length > whole for whole, start, length in zip(shape, offset, size, strict=True)
    ):
        raise _Damage(f"{name[:200]!r} is a part that its tensor does not have")
    if order is not None and sorted(order) != list(range(len(shape))):
        raise _Damage(f"the order of {name[:200]!r} does not name each of its dimensions once")
    if len(places) != 2 or places[1] - places[0] != math.prod(size) * _ITEM_BYTES[dtype]:
        raise _Damage(f"{name[:200]!r} has another number of bytes than its size and dtype need")
    return TensorRecord(dtype, shape, offset, size, places[0], places[1], order)


def _check_places(file: str, tensors: Mapping[str, TensorRecord], nbytes: int) -> None:
    end, before = 0, ""
    for begin, last, name in sorted((record.begin, record.end, name) for name, record in tensors.items()):
        if begin < end:
            raise _Damage(f"{name[:200]!r} overlaps {before[:200]!r} in {file}")
        if last > nbytes:
            raise _Damage(f"{name[:200]!r} lies beyond the end of {file}")
        end, before = last, name
