"""Writes a checkpoint: plan all files, check that there is room, stream them, write the manifest, publish."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool, crc32c_of
from deepoffload.checkpoint.block_writer import BlockWriter, write_small_file
from deepoffload.checkpoint.directory import prepare, staging, sync_file
from deepoffload.checkpoint.file_layout import TRAINING_NAME, TRAINING_TENSORS_NAME, PlannedFile, PlannedTensor
from deepoffload.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, manifest_text
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.checkpoint.shards import INDEX_NAME, split
from deepoffload.checkpoint.state_files import StatePlan
from deepoffload.checkpoint.tags import check_place, publish_tag
from deepoffload.checkpoint.values import encode
from deepoffload.checkpoint.weights import WeightPlan, plan_weights
from deepoffload.config.units import format_bytes
from deepoffload.errors import UnsupportedError
from deepoffload.io.engine import IoEngine
from deepoffload.params.torch_private import outside_user_modes

SHARD_BYTES = 5_000_000_000
SMALL_FILES_BYTES = 1 << 20
"""Room asked for in addition to what is counted: for configuration files and the index."""


@dataclass(frozen=True)
class Content:
    """What one checkpoint consists of.

    Attributes:
        training: everything that is no weight and no array of optimizer state; values that a checkpoint holds.
    """

    module: nn.Module
    weights: WeightPlan
    hub_names: bool
    state: StatePlan
    training: Mapping[str, Any]
    step: int


def choose_weight_plan(module: nn.Module, left_out: frozenset[str]) -> tuple[WeightPlan, bool]:
    """The plan of the weights, and whether they are named and packed as on the hub: where the module is a model of
    transformers whose packing can be undone when it is loaded, and which has no formats of its own (adapters)."""
    if transformers_format.is_pretrained_model(module):
        try:
            transformers_format.refuse_what_is_not_plain(module)
            plan = plan_weights(module, hub_names=True, left_out=left_out)
            for tensor in plan.tensors.values():
                for _ in plan.expressions.parts(tensor):
                    pass
            return plan, True
        except UnsupportedError:
            pass
    return plan_weights(module, hub_names=False, left_out=left_out), False


def write_checkpoint(directory: str, tag: str, content: Content, *, update_latest: bool) -> str:
    """Write everything and publish it; returns its folder.

    Raises:
        UsageError: the directory cannot be used. UnsupportedError: a value that a checkpoint does not hold.
        IoFailure: no room, or a transfer failed. Earlier checkpoints are as they were in all of these.
    """
    check_place(directory, tag)
    tensors: dict[str, Tensor] = {}
    training = encode(dict(content.training), "training", tensors)
    text = json.dumps(training, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    layout = split(content.weights.entries, SHARD_BYTES, content.weights.num_parameters)
    weight_files = [
        PlannedFile(name, [PlannedTensor(e.name, e.dtype, e.shape) for e in entries], content.weights.metadata)
        for name, entries in layout.files.items()
    ]
    extra = [PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    extra_files = [PlannedFile(TRAINING_TENSORS_NAME, extra, {"format": "pt"})] if extra else []
    planned = [*weight_files, *content.state.files, *extra_files]
    total_bytes = sum(file.nbytes for file in planned) + len(text)
    made = prepare(directory, total_bytes + SMALL_FILES_BYTES, "saving a checkpoint")
    path = os.path.join(directory, tag)
    done = f"saved {format_bytes(total_bytes)} to {path}"
    progress = Progress(total_bytes, f"saving to {path}", done)
    with staging(directory, made) as holder:
        staged = os.path.join(holder, "new")
        try:
            os.mkdir(staged)
        except OSError as error:
            raise failure("making a directory", error, staged, 0) from error
        small = _write_small_files(staged, content, layout.index, text)
        with _Files(staged, planned, progress) as files, outside_user_modes():
            files.write_weights(content.weights, weight_files)
            content.state.write(files.writer)
            files.write_tensors(tensors, extra_files)
            sums = files.finish()
        records: dict[str, Mapping[str, TensorRecord]] = {file.name: file.records() for file in planned}
        origin = written_by()
        manifest = Manifest(content.step, time.time_ns(), origin, {**sums, **small}, records)
        write_small_file(os.path.join(staged, MANIFEST_NAME), manifest_text(manifest))
        path = publish_tag(staged, directory, tag, update_latest=update_latest)
    progress.done()
    return path


def written_by() -> str:
    """What the manifest says about who wrote it."""
    package = importlib.import_module(__name__.partition(".")[0])  # by name: the package imports this module
    return f"deepoffload {package.__version__}"


def _write_small_files(staged: str, content: Content, index: str | None, training: bytes) -> dict[str, FileRecord]:
    """Configuration, index and ``training.json``; all of them, with their checksums."""
    try:
        if content.hub_names:
            transformers_format.write_config_files(content.module, staged)
    except OSError as error:
        raise failure("writing", error, error.filename or staged, 0) from error
    if index is not None:
        write_small_file(os.path.join(staged, INDEX_NAME), index.encode())
    write_small_file(os.path.join(staged, TRAINING_NAME), training)
    try:
        names = sorted(os.listdir(staged))
    except OSError as error:
        raise failure("writing", error, staged, 0) from error
    records = {}
    for name in names:
        path = os.path.join(staged, name)
        try:
            sync_file(path)
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise failure("writing", error, path, 0) from error
        sums = tuple(crc32c_of(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
        records[name] = FileRecord(len(data), sums)
    return records


class _Files:
    """The large files of one save, each opened when something is first written to it."""

    def __init__(self, staged: str, planned: Sequence[PlannedFile], progress: Progress) -> None:
        self._staged = staged
        self._planned = {file.name: file for file in planned}
        self._progress = progress
        self._writers: dict[str, BlockWriter] = {}
        self._pool = BlockPool()
        self._io = IoEngine(block_bytes=BLOCK_BYTES)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abandon()
        self._io.close()
        self._pool.close()

    def writer(self, name: str) -> BlockWriter:
        if name not in self._writers:
            path, nbytes = os.path.join(self._staged, name), self._planned[name].nbytes
            self._writers[name] = BlockWriter(self._io, self._pool, path, nbytes, self._progress.advance)
        return self._writers[name]

    def write_weights(self, plan: WeightPlan, files: Sequence[PlannedFile]) -> None:
        entries = {entry.name: entry for entry in plan.entries}
        for file in files:
            self.writer(file.name).put_bytes(0, file.header)
            for name, (_, begin) in file.places().items():
                self._stream(file.name, begin, entries[name].pieces())

    def write_tensors(self, tensors: Mapping[str, Tensor], files: Sequence[PlannedFile]) -> None:
        for file in files:
            self.writer(file.name).put_bytes(0, file.header)
            for name, (_, begin) in file.places().items():
                self._stream(file.name, begin, iter([tensors[name].cpu().contiguous().view(-1)]))

    def _stream(self, file: str, offset: int, pieces: Iterator[Tensor]) -> None:
        for piece in pieces:
            self.writer(file).put(offset, piece.data_ptr(), piece.nbytes)
            offset += piece.nbytes

    def finish(self) -> dict[str, FileRecord]:
        """All of it is on the disk; the checksums."""
        records = {}
        for name, file in self._planned.items():
            self.writer(name).finish()
            records[name] = FileRecord(file.nbytes, self.writer(name).sums)
        return records
