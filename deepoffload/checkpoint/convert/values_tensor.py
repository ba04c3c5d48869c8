"""What is read piece by piece, as a stored tensor of a checkpoint."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from deepoffload.checkpoint.convert.tensors import PIECE_BYTES, Values, nbytes_of
from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES, check_dtype
from deepoffload.checkpoint.source import StoredTensor


class ValuesTensor(StoredTensor):
    """A stored tensor whose elements are :class:`~deepoffload.checkpoint.convert.tensors.Values`.

    Args:
        number: its place in the order in which tensors are read.
    """

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
