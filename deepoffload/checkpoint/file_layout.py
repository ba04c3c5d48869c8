"""A safetensors file before it is written: which tensors, and where each will lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from deepoffload.checkpoint.manifest import TensorRecord
from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES, Entry, header_bytes, in_file_order
from deepoffload.errors import UnsupportedError
from deepoffload.native.aio import PAGE_BYTES

TRAINING_NAME = "training.json"
TRAINING_TENSORS_NAME = "training.safetensors"
OPTIMIZER_FILE = "optimizer-{:05d}-of-{:05d}.safetensors"
OPTIMIZER_PREFIX = "optimizer-"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be stored. ``order``: see :class:`~deepoffload.checkpoint.manifest.TensorRecord`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.order is None else tuple(self.shape[dim] for dim in self.order)


@dataclass(frozen=True)
class PlannedFile:
    """A file; its data begin on a page."""

    name: str
    tensors: Sequence[PlannedTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def places(self) -> dict[str, tuple[PlannedTensor, int]]:
        """Where each tensor begins, in bytes from the beginning of the file."""
        found = {}
        position = len(self.header)
        for tensor in self._ordered:
            found[tensor.name] = (tensor, position)
            position += tensor.nbytes
        return found

    @cached_property
    def _ordered(self) -> list[PlannedTensor]:
        by_name = {tensor.name: tensor for tensor in self.tensors}
        if len(by_name) != len(self.tensors):
            names = [tensor.name for tensor in self.tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise UnsupportedError(f"two tensors of the checkpoint would be called {twice!r}; rename a parameter")
        return [by_name[entry.name] for entry in in_file_order(map(_entry, self.tensors))]

    @cached_property
    def header(self) -> bytes:
        """The beginning of the file."""
        return header_bytes([_entry(tensor) for tensor in self._ordered], self.metadata, PAGE_BYTES)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def records(self) -> dict[str, TensorRecord]:
        """What the manifest says of the tensors."""
        return {
            name: TensorRecord(
                DTYPE_NAMES[tensor.dtype],
                tensor.shape,
                (0,) * len(tensor.shape),
                tensor.shape,
                begin,
                begin + tensor.nbytes,
                tensor.order,
            )
            for name, (tensor, begin) in self.places().items()
        }


def _entry(tensor: PlannedTensor) -> Entry:
    return Entry(tensor.name, tensor.dtype, tensor.stored_shape, tensor.nbytes, _nothing)


def _nothing() -> Iterator[Tensor]:
    return iter(())
