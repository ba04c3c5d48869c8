"""Writes a :class:`TrainingRun` as files of ``torch.distributed.checkpoint``; the format is in :mod:`dcp`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.convert.dcp import METADATA
from deepoffload.checkpoint.convert.exports import state_of
from deepoffload.checkpoint.convert.group_settings import for_torch
from deepoffload.checkpoint.convert.output import new_folder
from deepoffload.checkpoint.convert.tensors import Held, in_fp32
from deepoffload.checkpoint.convert.torch_writer import Streamed, write_archive
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.params.torch_private import place_in_distributed_file

DATA_FILE = "__0_0.distcp"


def write_dcp(run: TrainingRun, directory: str, progress: Callable[[int], None]) -> None:
    """``{"model": ..., "optimizer": ...}`` as ``torch.distributed.checkpoint.load`` reads it. Weights are fp32.

    Raises:
        UsageError: the place is taken. UnsupportedError: torch has no such optimizer. IoFailure: no room, or the disk
        failed.
    """
    items = _items(run)
    with new_folder(directory, run.nbytes) as folder:
        with open(os.path.join(folder, DATA_FILE), "xb") as file:
            metadata = _write_items(file, items, progress)
        write_small_file(os.path.join(folder, METADATA), pickle.dumps(metadata))


def _items(run: TrainingRun) -> dict[tuple[str | int, ...], Any]:
    """Every value with its path in the state dict."""
    items: dict[tuple[str | int, ...], Any] = {}
    for name in run.weights:
        items["model", name] = Streamed(in_fp32(run.exact(name)))
    for name, kept in run.aliases.items():
        items["model", name] = items["model", kept]
    for index, group in enumerate(run.groups):
        settings = {**for_torch(run.kind, group.settings, keep_own=True), "params": list(group.names)}
        for key, value in settings.items():
            items["optimizer", "param_groups", index, key] = value
        for name in group.names:
            for key, value in state_of(run, name).items():
                held = isinstance(value, torch.Tensor)
                items["optimizer", "state", name, key] = Streamed(Held(value)) if held else value
    return items


def _write_items(file: BinaryIO, items: dict[tuple[str | int, ...], Any], progress: Callable[[int], None]) -> Metadata:
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    paths = {}
    for path, value in items.items():
        name = ".".join(map(str, path))
        paths[name] = path
        begin = file.tell()
        length = write_archive(file, value, progress)
        if isinstance(value, Streamed):
            shape = torch.Size(value.values.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            described[name] = TensorStorageMetadata(TensorProperties(value.values.dtype), shape, [chunk])
            index = MetadataIndex(name, chunk.offsets)
        else:
            described[name] = BytesStorageMetadata()
            index = MetadataIndex(name)
        places[index] = place_in_distributed_file(DATA_FILE, begin, length)
    return Metadata(described, planner_data=paths, storage_data=places, version=CURRENT_DCP_VERSION)
