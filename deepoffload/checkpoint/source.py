"""A checkpoint that is being read: everything small in it is checked before anything is changed."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_reader import BlockReader, FileSpan, ReadsAhead
from deepoffload.checkpoint.file_layout import OPTIMIZER_PREFIX, TRAINING_NAME, TRAINING_TENSORS_NAME
from deepoffload.checkpoint.foreign import refuse_foreign
from deepoffload.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorRecord, open_plain, read_manifest
from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES
from deepoffload.checkpoint.values import decode, parse_json
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.io.engine import IoEngine
from deepoffload.io.safetensors_header import LENGTH_BYTES, header_length

DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_METADATA_BYTES_MAX = 1 << 20
_ENTRY_BYTES, _NUMBER_BYTES, _ESCAPED = 128, 21, 12
"""Of JSON, at most: around the name of a tensor, per dimension, and per character of a name that is written with
escapes."""


class StoredTensor(ABC):
    """A tensor of a checkpoint: reads any part of it."""

    def __init__(self, file: str, name: str, record: TensorRecord) -> None:
        self.file = file
        self.name = name
        self.record = record
        self.dtype = DTYPES[record.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    def span(self, start: int, numel: int) -> FileSpan:
        """Where elements lie, counted in the order in which they are stored."""
        size = self.dtype.itemsize
        return FileSpan(self.file, self.record.begin + start * size, numel * size)

    @abstractmethod
    def read_into(self, address: int, start: int, numel: int) -> None:
        """Put elements as they are at an address."""

    def read(self, start: int, numel: int) -> Tensor:
        """Elements as they are, flat."""
        values = torch.empty(numel, dtype=self.dtype, device="cpu")
        self.read_into(values.data_ptr(), start, numel)
        return values

    def whole(self) -> Tensor:
        """All of it in ordinary memory, in its own shape."""
        return self.in_shape(self.read(0, self.record.numel))

    def in_shape(self, stored: Tensor) -> Tensor:
        """Elements in stored order as the tensor that they are."""
        record = self.record
        if record.order is None:
            return stored.view(record.shape)
        places = [record.order.index(dim) for dim in range(len(record.shape))]
        return stored.view(record.stored_shape).permute(places)


class _VerifiedTensor(StoredTensor):
    """One of a checkpoint of ours."""

    def __init__(self, reader: BlockReader, file: str, name: str, record: TensorRecord) -> None:
        super().__init__(file, name, record)
        self._reader = reader

    def read_into(self, address: int, start: int, numel: int) -> None:
        self._reader.read(self.span(start, numel), address)


class TrainingSource:
    """What a training state is loaded from.

    Attributes:
        folder: of the checkpoint. step: optimizer steps that it stands after.
        reader: through which the tensors are read.
        weights: stored tensors of the model by name. arrays: those of the optimizer, by ``<parameter>.<key>``.
        training: the values of ``training.json``.
        is_own: it has what this rank alone has written, and no values of other ranks.
    """

    is_own = False

    def __init__(self, folder: str, step: int, reader: ReadsAhead) -> None:
        self.folder = folder
        self.step = step
        self.reader = reader
        self.weights: dict[str, StoredTensor] = {}
        self.arrays: dict[str, StoredTensor] = {}
        self.training: dict[str, Any] = {}

    def mapped_weights(self) -> dict[str, Tensor]:
        """The weights, mapped from their files: tensors that take no memory until they are changed.

        Raises:
            UnsupportedError: the files cannot be mapped. UsageError: a checksum is wrong.
        """
        raise UnsupportedError(
            f"{self.folder} is no checkpoint of deepoffload's own, so custom_load_fn cannot have its weights: convert "
            "it first (python -m deepoffload.checkpoint), and load the result"
        )

    @property
    def converted_from(self) -> str | None:
        """Which format it was converted from; None for one that a training run has saved."""
        found = self.training.get("converted_from")
        return found if isinstance(found, str) else None


class CheckpointSource(TrainingSource):
    """An open checkpoint of ours."""

    def __init__(self, folder: str, manifest: Manifest, reader: BlockReader) -> None:
        super().__init__(folder, manifest.step, reader)
        self.manifest = manifest
        self.blocks = reader
        extra: dict[str, StoredTensor] = {}
        for file in manifest.files:
            if file == TRAINING_NAME:
                continue
            if not file.endswith(".safetensors"):  # nobody reads it here, but from_pretrained will
                reader.verify(file)
                continue
            _check_header(reader, folder, file, manifest.tensors.get(file, {}))
            for name, record in manifest.tensors.get(file, {}).items():
                if record.size != record.shape:
                    raise UsageError(f"{folder}: {name} is stored in parts, which this version does not put together")
                target = self.arrays if file.startswith(OPTIMIZER_PREFIX) else self.weights
                target = extra if file == TRAINING_TENSORS_NAME else target
                if name in target:
                    raise UsageError(f"{folder} is damaged: {name[:200]!r} is in two files")
                target[name] = _VerifiedTensor(reader, file, name, record)
        self.training = self._read_training(extra)

    def mapped_weights(self) -> dict[str, Tensor]:
        for file in dict.fromkeys(tensor.file for tensor in self.weights.values()):
            self.blocks.verify(file)
        return {name: self._mapped(tensor) for name, tensor in self.weights.items()}

    def _mapped(self, tensor: StoredTensor) -> Tensor:
        record = tensor.record
        if not record.numel:
            return torch.empty(record.shape, dtype=tensor.dtype, device="cpu")
        with open(open_plain(os.path.join(self.folder, tensor.file)), "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return tensor.in_shape(torch.frombuffer(content, dtype=tensor.dtype, count=record.numel, offset=record.begin))

    def _read_training(self, extra: Mapping[str, StoredTensor]) -> dict[str, Any]:
        path = os.path.join(self.folder, TRAINING_NAME)
        if TRAINING_NAME not in self.manifest.files:
            raise UsageError(f"{self.folder} has no {TRAINING_NAME}: it is no checkpoint of a training state")

        def tensor(name: str) -> Tensor:
            if name not in extra:
                raise UsageError(f"{path} names the tensor {name[:200]!r}, which {TRAINING_TENSORS_NAME} does not have")
            return extra[name].whole()

        found = decode(parse_json(self.blocks.content(TRAINING_NAME), path), path, tensor)
        if not isinstance(found, dict):
            raise UsageError(f"{path} is damaged: it is no object")
        return found


@contextmanager
def open_checkpoint(folder: str, progress: Callable[[int], None]) -> Iterator[CheckpointSource]:
    """Open a checkpoint and check what is small in it: manifest, lengths of all files, headers, training values.

    Args:
        progress: told the bytes that were read and are right.

    Raises:
        UsageError: it is not complete, or damaged. UnsupportedError: a newer format. IoFailure: it cannot be read.
    """
    if not os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
        refuse_foreign(folder)
    manifest = read_manifest(folder)
    io, pool = IoEngine(block_bytes=BLOCK_BYTES), BlockPool()
    reader = BlockReader(io, pool, folder, manifest, progress)
    try:
        yield CheckpointSource(folder, manifest, reader)
    finally:
        reader.close()
        io.close()
        pool.close()


def _check_header(reader: BlockReader, folder: str, file: str, tensors: Mapping[str, TensorRecord]) -> None:
    path = os.path.join(folder, file)
    nbytes = reader.length_of_file(file)
    begin = reader.part(FileSpan(file, 0, min(LENGTH_BYTES, nbytes)))
    try:
        length = header_length(begin, nbytes, _header_bytes_max(tensors))
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    values_begin = LENGTH_BYTES + length
    header = parse_json(reader.part(FileSpan(file, LENGTH_BYTES, length)), path)
    expected = {
        name: {
            "dtype": record.dtype,
            "shape": list(record.stored_shape),
            "data_offsets": [record.begin - values_begin, record.end - values_begin],
        }
        for name, record in tensors.items()
    }
    if isinstance(header, dict):
        header.pop("__metadata__", None)
    if header != expected:
        raise UsageError(f"{path} is damaged: its header and the manifest do not agree; load another checkpoint")


def _header_bytes_max(tensors: Mapping[str, TensorRecord]) -> int:
    """The longest header that these tensors can have, with metadata of some length: it is read into memory before it is
    known to be one."""
    described = sum(
        _ENTRY_BYTES + _ESCAPED * len(name) + _NUMBER_BYTES * len(record.shape) for name, record in tensors.items()
    )
    return _METADATA_BYTES_MAX + described
