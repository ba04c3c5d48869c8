"""Weights for everybody: fp32 safetensors, and files that ``torch.load`` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.convert.deepspeed_files import STEP
from deepoffload.checkpoint.convert.group_settings import for_torch
from deepoffload.checkpoint.convert.output import new_folder
from deepoffload.checkpoint.convert.own_reader import config_of_type
from deepoffload.checkpoint.convert.tensors import Values, in_fp32, in_type, nbytes_of, numel_of, pieces_of
from deepoffload.checkpoint.convert.torch_writer import Streamed, write_torch_file
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.safetensors_file import Entry, check_dtype, in_file_order, write_file
from deepoffload.checkpoint.shards import INDEX_NAME, PICKLED_NAME, split
from deepoffload.errors import UnsupportedError

MODEL_NAME = "model.pt"
OPTIMIZER_NAME = "optimizer.pt"

Progress = Callable[[int], None]


def write_weights(
    run: TrainingRun, directory: str, max_shard_bytes: int, progress: Progress, dtype: torch.dtype = torch.float32
) -> None:
    """The weights, from their best precision, as safetensors in the Hugging Face layout, with ``config.json`` where
    there is one.

    Args:
        dtype: of weights that are floating-point numbers.

    Raises:
        UsageError: the place is taken. IoFailure: no room, or the disk failed.
    """
    entries = []
    stored = {name: run.exact(name) for name in run.weights} if run.as_on_hub is None else run.as_on_hub
    aliases = run.aliases if run.as_on_hub is None else {}
    for name, best in stored.items():
        values = in_type(best, dtype)
        check_dtype(name, values.dtype)
        entries.append(_entry(name, values))
    layout = split(in_file_order(entries), max_shard_bytes, _total_params(run))
    with new_folder(directory, layout.total_bytes) as folder:
        for name, shard in layout.files.items():
            write_file(os.path.join(folder, name), shard, {"format": "pt", **aliases}, progress)
        if layout.index is not None:
            write_small_file(os.path.join(folder, INDEX_NAME), layout.index.encode())
        for name, content in run.config_files.items():
            write_small_file(os.path.join(folder, name), config_of_type(name, content, dtype))


def write_pickled_weights(
    run: TrainingRun,
    directory: str,
    max_shard_bytes: int,
    dtype: torch.dtype = torch.float32,
    left_out: Collection[str] = (),
) -> None:
    """The ``state_dict`` as ``pytorch_model.bin``, or as several such files with an index, for ``torch.load``.

    Args:
        dtype: of weights that are floating-point numbers.
        left_out: names of weights.

    Raises:
        UsageError: the place is taken. IoFailure: no room, or the disk failed.
    """
    streamed = {name: Streamed(in_type(run.exact(name), dtype)) for name in run.weights if name not in left_out}
    entries = [_entry(name, held.values) for name, held in streamed.items()]
    layout = split(entries, max_shard_bytes, _total_params(run), PICKLED_NAME)
    with new_folder(directory, layout.total_bytes) as folder:
        for file, shard in layout.files.items():
            kept = {entry.name: streamed[entry.name] for entry in shard}
            tied = {name: kept[first] for name, first in run.aliases.items() if first in kept}
            write_torch_file(os.path.join(folder, file), kept | tied, lambda nbytes: None)
        if layout.index is not None:
            write_small_file(os.path.join(folder, f"{PICKLED_NAME}.index.json"), layout.index.encode())


def _entry(name: str, values: Values) -> Entry:
    return Entry(name, values.dtype, values.shape, nbytes_of(values), partial(pieces_of, values))


def _total_params(run: TrainingRun) -> int:
    return sum(numel_of(run.weights[name]) for name in run.weights)


def write_torch(run: TrainingRun, directory: str, progress: Progress) -> None:
    """``model.pt``, a ``state_dict`` in fp32, and ``optimizer.pt``, one that torch's optimizer of the same kind loads.

    Raises:
        UsageError: the place is taken. UnsupportedError: torch has no such optimizer. IoFailure: no room, or the disk
        failed.
    """
    optimizer = None if run.kind is None else _optimizer_state(run)
    model = {name: Streamed(in_fp32(run.exact(name))) for name in run.weights}
    model.update({name: model[kept] for name, kept in run.aliases.items()})
    with new_folder(directory, run.nbytes) as folder:
        write_torch_file(os.path.join(folder, MODEL_NAME), model, progress)
        if optimizer is not None:
            write_torch_file(os.path.join(folder, OPTIMIZER_NAME), optimizer, progress)


def _optimizer_state(run: TrainingRun) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    groups = []
    for group in run.groups:
        mine = [numbers.setdefault(name, len(numbers)) for name in group.names]
        groups.append({**for_torch(run.kind, group.settings), "params": mine})
    states = {}
    for name, number in numbers.items():
        state = state_of(run, name)
        if state:
            states[number] = state
    return {"state": states, "param_groups": groups}


def state_of(run: TrainingRun, name: str) -> dict[str, Any]:
    """A parameter's state as torch's optimizers hold it, with streamed arrays."""
    state: dict[str, Any] = {}
    for key, value in run.small.get(name, {}).items():
        if key == STEP:
            state[key] = torch.tensor(float(value), dtype=torch.float32)
        elif value is None or isinstance(value, (bool, int, float)):
            state[key] = value
        else:
            raise UnsupportedError(f"{name}.{key} is a {type(value).__name__}, which this format has no place for")
    for key, values in run.arrays.get(name, {}).items():
        state[key] = Streamed(values)
    return state
