"""A durable step that is being read: its record is checked, and looks like a checkpoint to those who load one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from deepoffload.checkpoint.durable_content import FORMAT_NAME, FORMAT_VERSION, ZEROS, Run
from deepoffload.checkpoint.extent_reader import ExtentReader
from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.source import DTYPES, StoredTensor, TrainingSource
from deepoffload.checkpoint.values import decode, parse_json
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.io.durable_store import DurableStep
from deepoffload.io.swap_space import SwapSpace

_KINDS = ("weights", "arrays", "values")


class _DurableTensor(StoredTensor):
    """A tensor of a durable step."""

    def __init__(self, reader: ExtentReader, file: str, name: str, record: TensorRecord) -> None:
        super().__init__(file, name, record)
        self._reader = reader

    def read_into(self, address: int, start: int, numel: int) -> None:
        self._reader.read(self.span(start, numel), address)


class _InRowMajor(_DurableTensor):
    """One that is stored in another order of its dimensions, read as if it were not."""

    def __init__(self, reader: ExtentReader, file: str, name: str, record: TensorRecord) -> None:
        plain = TensorRecord(record.dtype, record.shape, record.offset, record.size, record.begin, record.end)
        super().__init__(reader, file, name, plain)
        self._stored = _DurableTensor(reader, file, name, record)

    def read_into(self, address: int, start: int, numel: int) -> None:
        values = self._stored.whole().contiguous().view(-1)[start : start + numel]
        ctypes.memmove(address, values.data_ptr(), values.nbytes)


class DurableSource(TrainingSource):
    """An open durable step.

    Raises:
        UsageError: the record is damaged. UnsupportedError: a newer format.
    """

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
        runs: dict[str, list[Run]] = {}
        try:
            blocks = [str(name) for name in said["blocks"]]
            for kind in _KINDS:
                for name, described in said["tensors"][kind].items():
                    key = f"{kind}/{name}"
                    records[key], runs[key] = _checked(described, lengths)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{folder} is damaged: its tensors are not described ({error!r:.200})") from error
        self.extents = ExtentReader(space, found, runs, blocks)
        super().__init__(folder, found.step, self.extents)
        for key, name, record in _of("weights", records):
            made = _DurableTensor if record.order is None else _InRowMajor
            self.weights[name] = made(self.extents, key, name, record)
        for key, name, record in _of("arrays", records):
            self.arrays[name] = _DurableTensor(self.extents, key, name, record)
        values = {name: _DurableTensor(self.extents, key, name, record) for key, name, record in _of("values", records)}
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


def _checked(described: Mapping[str, Any], lengths: list[int]) -> tuple[TensorRecord, list[Run]]:
    """What is said of a tensor. Raises ValueError and its like for anything else."""
    dtype, shape = DTYPES[described["dtype"]], tuple(int(size) for size in described["shape"])
    order = tuple(int(dim) for dim in described["order"]) if "order" in described else None
    if order is not None and sorted(order) != list(range(len(shape))):
        raise ValueError("an order of dimensions")
    runs = [(int(number), int(offset), int(nbytes)) for number, offset, nbytes in described["runs"]]
    for number, offset, nbytes in runs:
        if number != ZEROS and not (0 <= offset and 0 < nbytes and offset + nbytes <= lengths[number] and number >= 0):
            raise ValueError("a run outside of its extent")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != sum(run[2] for run in runs):
        raise ValueError("a tensor with other runs")
    zeros = (0,) * len(shape)
    record = TensorRecord(described["dtype"], shape, zeros, shape, 0, math.prod(shape) * dtype.itemsize, order)
    return record, runs


@contextmanager
def open_durable(space: SwapSpace, found: DurableStep) -> Iterator[DurableSource]:
    """Open a durable step. Raises as :class:`DurableSource`."""
    source = DurableSource(space, found)
    try:
        yield source
    finally:
        source.extents.close()
