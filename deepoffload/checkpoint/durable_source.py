"""A durable step that is being read: its record is checked, and looks like a checkpoint to those who load one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.durable_content import FORMAT_NAME, FORMAT_VERSION, ZEROS, Run
from deepoffload.checkpoint.extent_reader import ExtentReader
from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.source import DTYPES, StoredTensor, TrainingSource
from deepoffload.checkpoint.values import decode, parse_json
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.io.durable_store import DurableStep
from deepoffload.io.swap_space import SwapSpace

_KINDS = ("weights", "arrays", "values")


class _OwnPart(NamedTuple):
    """The elements of a tensor that a rank has, in the order in which they are stored."""

    first: int
    numel: int


class _DurableTensor(StoredTensor):
    """A tensor of a durable step. Of one that several ranks have, the part of this rank."""

    def __init__(self, reader: ExtentReader, file: str, name: str, record: TensorRecord, own: _OwnPart) -> None:
        super().__init__(file, name, record)
        self._reader = reader
        self._own = own

    def span(self, start: int, numel: int) -> FileSpan:
        """As above, as far as this rank has it."""
        first = min(max(start, self._own.first), self._own.first + self._own.numel)
        end = min(max(start + numel, first), self._own.first + self._own.numel)
        return super().span(first - self._own.first, end - first)

    def read_into(self, address: int, start: int, numel: int) -> None:
        span = self.span(start, numel)
        if span.nbytes != numel * self.dtype.itemsize:
            raise UsageError(
                f"{self.name}: of its elements from {start} to {start + numel} this rank has those from "
                f"{self._own.first} to {self._own.first + self._own.numel}. Resume with the settings of the run that "
                "made the durable state, or load a checkpoint: state.load(directory)"
            )
        self._reader.read(span, address)

    def own_in_shape(self) -> Tensor:
        """The tensor in its own shape, with nothing in the place of what other ranks have."""
        values = torch.zeros(self.record.numel, dtype=self.dtype, device="cpu")
        if self._own.numel:
            first, last = self._own.first, self._own.first + self._own.numel
            self.read_into(values[first:last].data_ptr(), first, self._own.numel)
        return self.in_shape(values)


class _InRowMajor(_DurableTensor):
    """One that is stored in another order of its dimensions, read as if it were not."""

    def __init__(self, reader: ExtentReader, file: str, name: str, record: TensorRecord, own: _OwnPart) -> None:
        plain = TensorRecord(record.dtype, record.shape, record.offset, record.size, record.begin, record.end)
        super().__init__(reader, file, name, plain, own)
        self._stored = _DurableTensor(reader, file, name, record, own)

    def span(self, start: int, numel: int) -> FileSpan:
        """All of it: its elements lie in another order."""
        return self._stored.span(0, self.record.numel)

    def read_into(self, address: int, start: int, numel: int) -> None:
        values = self._stored.own_in_shape().contiguous().view(-1)[start : start + numel]
        ctypes.memmove(address, values.data_ptr(), values.nbytes)


class DurableSource(TrainingSource):
    """An open durable step.

    Attributes:
        own_parts: by name of a weight, what of it is there.

    Raises:
        UsageError: the record is damaged. UnsupportedError: a newer format.
    """

    is_own = True

    def __init__(self, space: SwapSpace, found: DurableStep) -> None:
        folder = f"the durable state in {', '.join(space.paths)}"
        said = parse_json(found.content, folder)
        if not isinstance(said, dict) or said.get("format") != FORMAT_NAME:
            raise UsageError(f"{folder} is damaged: it is of another kind")
        if said.get("version") != FORMAT_VERSION:
            raise UnsupportedError(
                f"{folder} has version {said.get('version')!r} of its format, and this deepoffload reads "
                f"{FORMAT_VERSION}; resume with the version that wrote it"
            )
        lengths = [stored.extent.nbytes for stored in found.extents]
        records: dict[str, TensorRecord] = {}
        own: dict[str, _OwnPart] = {}
        runs: dict[str, list[Run]] = {}
        try:
            blocks = [str(name) for name in said["blocks"]]
            for kind in _KINDS:
                for name, described in said["tensors"][kind].items():
                    key = f"{kind}/{name}"
                    records[key], runs[key], own[key] = _checked(described, lengths)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{folder} is damaged: its tensors are not described ({error!r:.200})") from error
        self.extents = ExtentReader(space, found, runs, blocks)
        super().__init__(folder, found.step, self.extents)
        for key, name, record in _of("weights", records):
            made = _DurableTensor if record.order is None else _InRowMajor
            self.weights[name] = made(self.extents, key, name, record, own[key])
        for key, name, record in _of("arrays", records):
            self.arrays[name] = _DurableTensor(self.extents, key, name, record, own[key])
        values = {
            name: _DurableTensor(self.extents, key, name, record, own[key])
            for key, name, record in _of("values", records)
        }
        self.own_parts = {name: own[key] for key, name, _ in _of("weights", records)}
        self.training = self._values(said.get("state"), values)

    def _values(self, state: Any, values: Mapping[str, StoredTensor]) -> dict[str, Any]:
        def tensor(name: str) -> Tensor:
            if name not in values:
                raise UsageError(f"{self.folder} is damaged: it does not have the tensor {name[:200]!r}")
            return values[name].whole()

        found = decode(state, self.folder, tensor)
        if not isinstance(found, dict):
            raise UsageError(f"{self.folder} is damaged: it has no values")
        return found


def _of(kind: str, records: Mapping[str, TensorRecord]) -> Iterator[tuple[str, str, TensorRecord]]:
    for key, record in records.items():
        if key.startswith(f"{kind}/"):
            yield key, key.partition("/")[2], record


def _checked(described: Mapping[str, Any], lengths: list[int]) -> tuple[TensorRecord, list[Run], _OwnPart]:
    """What is said of a tensor. Raises ValueError and its like for anything else."""
    dtype, shape = DTYPES[described["dtype"]], tuple(int(size) for size in described["shape"])
    order = tuple(int(dim) for dim in described["order"]) if "order" in described else None
    if order is not None and sorted(order) != list(range(len(shape))):
        raise ValueError("an order of dimensions")
    runs = [(int(number), int(offset), int(nbytes)) for number, offset, nbytes in described["runs"]]
    for number, offset, nbytes in runs:
        if number != ZEROS and not (0 <= offset and 0 < nbytes and offset + nbytes <= lengths[number] and number >= 0):
            raise ValueError("a run outside of its extent")
    nbytes, numel = sum(run[2] for run in runs), math.prod(shape)
    own = _OwnPart(int(described.get("first", 0)), nbytes // dtype.itemsize)
    inside = 0 <= own.first <= own.first + own.numel <= numel and nbytes % dtype.itemsize == 0
    if any(size < 0 for size in shape) or not inside or ("first" not in described and own.numel != numel):
        raise ValueError("a tensor with other runs")
    zeros = (0,) * len(shape)
    record = TensorRecord(described["dtype"], shape, zeros, shape, 0, math.prod(shape) * dtype.itemsize, order)
    return record, runs, own


@contextmanager
def open_durable(space: SwapSpace, found: DurableStep) -> Iterator[DurableSource]:
    """Open a durable step. Raises as :class:`DurableSource`."""
    source = DurableSource(space, found)
    try:
        yield source
    finally:
        source.extents.close()
