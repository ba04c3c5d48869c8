"""A :class:`TrainingRun` of another library as what a training state is loaded from, without a copy on the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.convert.own_writer import training_values
from deepoffload.checkpoint.convert.tensors import PIECE_BYTES, Values, nbytes_of
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES, check_dtype
from deepoffload.checkpoint.source import StoredTensor, TrainingSource


@dataclass(frozen=True)
class _Nothing:
    """Reads nothing ahead: the files are read through the page cache, which does."""

    def will_read(self, spans: Iterable[FileSpan]) -> None:
        pass


class _RunTensor(StoredTensor):
    """A tensor whose elements a run gives."""

    def __init__(self, name: str, number: int, values: Values, progress: Callable[[int], None]) -> None:
        check_dtype(name, values.dtype)
        shape = tuple(values.shape)
        zeros = (0,) * len(shape)
        record = TensorRecord(DTYPE_NAMES[values.dtype], shape, zeros, shape, 0, nbytes_of(values))
        super().__init__(f"{number:09d}", name, record)
        self._values = values
        self._progress = progress

    def read(self, start: int, numel: int) -> Tensor:
        found = self._values.read(start, numel)
        self._progress(found.nbytes)
        return found

    def read_into(self, address: int, start: int, numel: int) -> None:
        step = PIECE_BYTES // self.dtype.itemsize
        for at in range(start, start + numel, step):
            part = self.read(at, min(step, start + numel - at)).contiguous()
            ctypes.memmove(address, part.data_ptr(), part.nbytes)
            address += part.nbytes


def source_of(run: TrainingRun, folder: str, progress: Callable[[int], None]) -> TrainingSource:
    """What a training state loads.

    Args:
        folder: which checkpoint it is, for messages. progress: told the bytes that were read.

    Raises:
        UnsupportedError: a type of tensor that a checkpoint does not hold.
    """
    source = TrainingSource(folder, run.step, _Nothing())
    for name in run.weights:
        source.weights[name] = _RunTensor(name, len(source.weights), run.exact(name), progress)
    for param, held in run.arrays.items():
        for key, values in held.items():
            full = f"{param}.{key}"
            source.arrays[full] = _RunTensor(full, len(source.weights) + len(source.arrays), values, progress)
    source.training.update(training_values(run))
    return source
