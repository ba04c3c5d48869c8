"""Writes a :class:`TrainingRun` as a checkpoint of ours."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_writer import BlockWriter, write_small_file
from deepoffload.checkpoint.convert.output import SMALL_FILES_BYTES
from deepoffload.checkpoint.convert.tensors import Held, Values, nbytes_of, pieces_of
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.directory import prepare, staging
from deepoffload.checkpoint.file_layout import TRAINING_NAME, TRAINING_TENSORS_NAME, PlannedFile, PlannedTensor
from deepoffload.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, manifest_text
from deepoffload.checkpoint.safetensors_file import Entry, check_dtype, failure, in_file_order
from deepoffload.checkpoint.saving import SHARD_BYTES, written_by
from deepoffload.checkpoint.shards import INDEX_NAME, split
from deepoffload.checkpoint.state_files import in_shards
from deepoffload.checkpoint.tags import check_place, checked_tag, publish_tag
from deepoffload.checkpoint.values import encode
from deepoffload.io.checksums import crc32c_of
from deepoffload.io.engine import IoEngine

_METADATA = {"format": "pt"}


def write_own(run: TrainingRun, directory: str, tag: str | None, progress: Callable[[int], None]) -> str:
    """Write ``directory/tag`` and name it in ``latest``; returns the folder.

    A weight is stored in its best precision. A tag of ours that is there already is replaced when the new one is
    complete; nothing else is.

    Args:
        tag: ``global_step<n>`` when not said.

    Raises:
        UsageError: the place cannot be used. UnsupportedError: a type that the format does not have.
        IoFailure: no room, or the disk failed.
    """
    name = checked_tag(f"global_step{run.step}" if tag is None else tag)
    target = os.path.abspath(directory)
    check_place(target, name)
    values = {weight: run.exact(weight) for weight in run.weights}
    weight_files, index = _plan_weights(run, values)
    arrays: list[list[PlannedTensor]] = []
    for param, held in run.arrays.items():
        arrays.append([PlannedTensor(f"{param}.{key}", array.dtype, array.shape) for key, array in held.items()])
        values.update({f"{param}.{key}": array for key, array in held.items()})
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(training_values(run), "training", tensors), ensure_ascii=False, allow_nan=False).encode()
    extra = [PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    values_of_training: dict[str, Values] = {name: Held(tensor) for name, tensor in tensors.items()}
    planned = [*weight_files, *in_shards(arrays, SHARD_BYTES)]
    made = prepare(target, sum(file.nbytes for file in planned) + len(text) + SMALL_FILES_BYTES, "converting")
    with staging(target, made) as holder:
        staged = os.path.join(holder, "new")
        try:
            os.mkdir(staged)
        except OSError as error:
            raise failure("making a directory", error, staged, 0) from error
        records = _write_files(staged, planned, values, progress)
        if extra:
            training_file = PlannedFile(TRAINING_TENSORS_NAME, extra, _METADATA)
            planned.append(training_file)
            records.update(_write_files(staged, [training_file], values_of_training, progress))
        small = {TRAINING_NAME: text, **run.config_files, **({} if index is None else {INDEX_NAME: index.encode()})}
        for file, content in small.items():
            write_small_file(os.path.join(staged, file), content)
            sums = tuple(crc32c_of(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES))
            records[file] = FileRecord(len(content), sums)
        places = {file.name: file.records() for file in planned}
        manifest = Manifest(run.step, time.time_ns(), written_by(), records, places)
        write_small_file(os.path.join(staged, MANIFEST_NAME), manifest_text(manifest))
        return publish_tag(staged, target, name, update_latest=True)


def training_values(run: TrainingRun) -> dict[str, object]:
    """What goes into ``training.json``."""
    optimizer = None
    if run.kind is not None:
        states = {name: {key: _scalar(value) for key, value in state.items()} for name, state in run.small.items()}
        optimizer = {
            "kind": run.kind,
            "groups": [dict(group.settings) for group in run.groups],
            "params": [list(group.names) for group in run.groups],
            "states": states,
        }
    return {
        "weights": {"hub_names": False, "left_out": []},
        "optimizer": optimizer,
        "others": dict(run.others),
        "random": None,
        "client_state": run.client_state,
        "converted_from": run.source,
    }


def _scalar(value: object) -> object:
    """A step count as optimizers hold it."""
    return torch.tensor(float(value), dtype=torch.float32) if isinstance(value, (int, float)) else value


def _plan_weights(run: TrainingRun, values: dict[str, Values]) -> tuple[list[PlannedFile], str | None]:
    entries = []
    for name in run.weights:
        tensor = values[name]
        check_dtype(name, tensor.dtype)
        entries.append(Entry(name, tensor.dtype, tensor.shape, nbytes_of(tensor), partial(pieces_of, tensor)))
    ordered = in_file_order(entries)
    layout = split(ordered, SHARD_BYTES, sum(entry.nbytes // entry.dtype.itemsize for entry in ordered))
    metadata = {**_METADATA, **run.aliases}
    files = [
        PlannedFile(name, [PlannedTensor(entry.name, entry.dtype, entry.shape) for entry in shard], metadata)
        for name, shard in layout.files.items()
    ]
    return files, layout.index


def _write_files(
    staged: str, planned: Sequence[PlannedFile], values: dict[str, Values], progress: Callable[[int], None]
) -> dict[str, FileRecord]:
    records = {}
    io, pool = IoEngine(block_bytes=BLOCK_BYTES), BlockPool()
    try:
        for file in planned:
            writer = BlockWriter(io, pool, os.path.join(staged, file.name), file.nbytes, progress)
            try:
                writer.put_bytes(0, file.header)
                for name, (_, begin) in file.places().items():
                    for piece in pieces_of(values[name]):
                        writer.put(begin, piece.data_ptr(), piece.nbytes)
                        begin += piece.nbytes
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
            records[file.name] = FileRecord(file.nbytes, tuple(writer.sums))
    finally:
        io.close()
        pool.close()
    return records
