"""The safetensors format, written as a stream (https://huggingface.co/docs/safetensors: header length, JSON, bytes)."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepoffload.errors import IoFailure, UnsupportedError

HEADER_ALIGNMENT = 8

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``pieces()`` gives its values in row-major order, as contiguous CPU tensors."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[Tensor]]


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ``UnsupportedError`` for a type that the format does not have."""
    if dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"{name} is {dtype}, which safetensors files cannot hold; convert it before saving")


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Widest elements first, else as given: every tensor then starts at a multiple of its element size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def header_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str], alignment_bytes: int = HEADER_ALIGNMENT
) -> bytes:
    """The start of a file that holds ``entries`` in this order; the data behind it begin at a multiple of
    ``alignment_bytes``."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment_bytes)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: str, entries: Sequence[Entry], metadata: Mapping[str, str], progress: Callable[[int], None]
) -> None:
    """Write ``entries`` in this order and put them on the disk (fsync).

    Args:
        progress: told the bytes of every piece once it is written.

    Raises:
        IoFailure: with the errno, path and offset; what has been written so far is left to the caller.
    """
    out = _Output()
    try:
        with open(path, "xb", buffering=0) as file:
            out.write(file.fileno(), header_bytes(entries, metadata))
            for entry in entries:
                end = out.offset + entry.nbytes
                for piece in entry.pieces():
                    if piece.numel():
                        out.write(file.fileno(), piece.view(torch.uint8).numpy())
                        progress(piece.nbytes)
                    del piece  # a view of a weight: the next one may need its room
                if out.offset != end:
                    raise RuntimeError(f"{entry.name}: {end - out.offset} of {entry.nbytes} bytes are missing")
            os.fsync(file.fileno())
    except IoFailure:
        raise  # reading a weight failed
    except OSError as error:
        raise failure("writing", error, path, out.offset) from error


def write_at(descriptor: int, path: str, offset: int, piece: Tensor) -> int:
    """Write a contiguous piece at a place of a file. Returns where it ends. Raises as :func:`write_file`."""
    rest = memoryview(piece.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while rest:
        try:
            written = os.pwrite(descriptor, rest, offset)
        except OSError as error:
            raise failure("writing", error, path, offset) from error
        offset += written
        rest = rest[written:]
    return offset


class _Output:
    """Counts what has been written, so that a failure can say where."""

    def __init__(self) -> None:
        self.offset = 0

    def write(self, descriptor: int, data: object) -> None:
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        while rest:
            written = os.write(descriptor, rest)
            self.offset += written
            rest = rest[written:]


def failure(action: str, error: OSError, path: str, offset: int, nbytes: int = 0) -> IoFailure:
    """An ``OSError`` of saving in our form."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "The disk (or the user's quota) is full: free some space or save to another directory. "
        "What had been written has been removed; an earlier save in the directory is untouched"
        if full
        else "What had been written has been removed"
    )
    return IoFailure(action, error.errno or errno.EIO, path, offset, nbytes, remedy)
