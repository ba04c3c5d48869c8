"""Safetensors files of anybody's: which ones a path names, and what their headers say. Nothing in them is believed."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES
from deepoffload.checkpoint.shards import INDEX_NAME, WEIGHTS_NAME
from deepoffload.checkpoint.source import DTYPES
from deepoffload.checkpoint.values import clipped, parse_json
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.safetensors_header import HEADER_BYTES_MAX, LENGTH_BYTES, header_length

INDEX_BYTES_MAX = HEADER_BYTES_MAX
_DIMS_MAX = 64
_AGAIN = "copy or download it again"


class FileTensor(NamedTuple):
    """A tensor of a file: its elements lie in row-major order from byte ``begin`` of the file on."""

    path: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class PlainFile(NamedTuple):
    """A file whose header is right. ``status``: what it was when that was read. ``header_bytes``: of its beginning,
    before the values."""

    path: str
    status: os.stat_result
    header_bytes: int
    tensors: Mapping[str, FileTensor]

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.status.st_size


def open_files(path: str | os.PathLike[str]) -> list[PlainFile]:
    """The files of a model: one file, or the directory or index of several. Reads their headers, and checks them.

    Raises:
        UsageError: there are none, or one is damaged, cut off, or not what the index says. The message names the file
            and the tensor. IoFailure: one cannot be read.
    """
    given = os.fspath(path)
    if os.path.isdir(given):
        index, single = os.path.join(given, INDEX_NAME), os.path.join(given, WEIGHTS_NAME)
        if not os.path.exists(index):
            if not os.path.exists(single):
                raise UsageError(
                    f"{given} has neither {WEIGHTS_NAME} nor {INDEX_NAME}: name the file itself, or save the model as "
                    "safetensors (deepoffload.save_pretrained, or save_pretrained of transformers)"
                )
            return [_read(single)]
        given = index
    if given.endswith(".index.json"):
        return _indexed(given)
    return [_read(given)]


def _indexed(path: str) -> list[PlainFile]:
    index = parse_json(_content(path), path)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise UsageError(f"{path} is no index of safetensors files: it has no weight_map with a file for each tensor")
    directory = os.path.dirname(path)
    for name, file in named.items():
        if os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise UsageError(
                f"{path} says that {clipped(name)} is in {clipped(file)!r}: that is no safetensors file next to it"
            )
    files = [_read(os.path.join(directory, file)) for file in sorted(set(named.values()))]
    home: dict[str, str] = {}
    for file in files:
        base = os.path.basename(file.path)
        for name in file.tensors:
            if name in home:
                raise UsageError(f"{clipped(name)} is in {home[name]} and in {base} of {directory}")
            home[name] = base
    for name, said in named.items():
        if home.get(name) != said:
            found = f"it is in {home[name]}" if name in home else "no file has it"
            raise UsageError(f"{path} says that {clipped(name)} is in {said}, but {found}: {_AGAIN}")
    return files


def _content(path: str) -> bytes:
    with open(_open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > INDEX_BYTES_MAX:
            raise UsageError(f"{path} has {nbytes} bytes, too many for an index of files")
        try:
            return file.read()
        except OSError as error:
            raise IoFailure("reading", error.errno or 0, path, 0, nbytes) from error


def _open_regular(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        hint = " (only local files are read: download a model of the hub first)" if not os.path.exists(path) else ""
        raise UsageError(f"{path} cannot be read: {error.strerror}{hint}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is no ordinary file")
    return descriptor


def _read(path: str) -> PlainFile:
    path = os.path.realpath(path)
    with open(_open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        nbytes = status.st_size
        try:
            length = header_length(file.read(LENGTH_BYTES), nbytes)
            text = file.read(length)
        except ValueError as error:
            raise UsageError(
                f"{path} is no safetensors file, or is cut off: it has {nbytes} bytes, and {error}"
            ) from None
        except OSError as error:
            raise IoFailure("reading the header", error.errno or 0, path, 0, nbytes) from error
    header = parse_json(text.rstrip(b" "), path)
    if not isinstance(header, dict):
        raise UsageError(f"{path} is damaged: its header is no object; {_AGAIN}")
    header_bytes = LENGTH_BYTES + length
    tensors = {
        name: _tensor(path, name, record, header_bytes) for name, record in header.items() if name != "__metadata__"
    }
    _check_places(path, tensors, header_bytes, nbytes)
    return PlainFile(path, status, header_bytes, tensors)


def _tensor(path: str, name: str, record: Any, header_bytes: int) -> FileTensor:
    what = f"{clipped(name)} of {path}"
    if not isinstance(record, dict):
        raise UsageError(f"{what} is not described by an object; {_AGAIN}")
    dtype = record.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UsageError(
            f"{what} has the dtype {clipped(repr(dtype), 40)}, and only {', '.join(DTYPE_NAMES.values())} can be read"
        )
    shape, places = _wholes(record.get("shape")), _wholes(record.get("data_offsets"))
    if shape is None or len(shape) > _DIMS_MAX:
        raise UsageError(
            f"{what} has the shape {clipped(repr(record.get('shape')), 40)}, which no tensor has; {_AGAIN}"
        )
    if places is None or len(places) != 2:
        raise UsageError(f"{what} lies at {clipped(repr(record.get('data_offsets')), 40)}, which is no place; {_AGAIN}")
    needed_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if places[1] - places[0] != needed_bytes:
        raise UsageError(
            f"{what} needs {needed_bytes} bytes for {dtype}{shape}, and its header gives it bytes {places[0]} to "
            f"{places[1]}; {_AGAIN}"
        )
    return FileTensor(path, name, DTYPES[dtype], tuple(shape), header_bytes + places[0])


def _wholes(values: Any) -> list[int] | None:
    """A list of numbers that can be sizes or places; None for anything else."""
    fits = isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    return values if fits else None


def _spans(tensors: Mapping[str, FileTensor]) -> Iterator[tuple[int, int, str]]:
    for tensor in tensors.values():
        yield tensor.begin, tensor.begin + tensor.numel * tensor.dtype.itemsize, tensor.name


def _check_places(path: str, tensors: Mapping[str, FileTensor], header_bytes: int, nbytes: int) -> None:
    """As the format demands it: the values lie one after the other, without holes, up to the end of the file."""
    end = header_bytes
    for begin, last, name in sorted(_spans(tensors)):
        if begin != end:
            how = "overlaps what lies before it" if begin < end else "has a hole before it"
            raise UsageError(f"{clipped(name)} of {path} {how}: its header is wrong; {_AGAIN}")
        if last > nbytes:
            raise UsageError(
                f"{path} is cut off: it has {nbytes} bytes, and {clipped(name)} ends at byte {last}; {_AGAIN}"
            )
        end = last
    if end != nbytes:
        raise UsageError(f"{path} has {nbytes - end} bytes that belong to no tensor; {_AGAIN}")
