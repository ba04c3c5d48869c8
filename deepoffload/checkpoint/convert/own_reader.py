"""A checkpoint of ours as a :class:`TrainingRun`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepoffload.checkpoint.block_reader import BlockReader, FileSpan
from deepoffload.checkpoint.convert.packing import Packing, packing_of
from deepoffload.checkpoint.convert.tensors import PIECE_BYTES, Computed, Fragment, Joined, Values, row_major_stride
from deepoffload.checkpoint.convert.training_run import GroupOfParams, TrainingRun
from deepoffload.checkpoint.convert.values_tensor import ValuesTensor
from deepoffload.checkpoint.file_layout import TRAINING_NAME
from deepoffload.checkpoint.shards import INDEX_NAME, is_weight_file
from deepoffload.checkpoint.source import CheckpointSource, StoredTensor, open_checkpoint
from deepoffload.checkpoint.stored_param import LEADS, StoredParam
from deepoffload.checkpoint.tags import checked_directory, folder_to_load, lacking_in
from deepoffload.checkpoint.values import parse_json
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.foreign.packed import is_packed_key

_CONFIG_BYTES_MAX = 16 << 20
_NAMES_SHOWN = 8


def own_folder(directory: str, tag: str | None) -> str:
    """The folder of a tag, or of the newest one.

    Raises:
        UsageError: there is none.
    """
    path = checked_directory(directory)
    folder = folder_to_load(path, tag)
    if folder is None:
        raise UsageError(f"there is nothing to read in {path}: {lacking_in(path)}")
    return folder


@contextmanager
def open_own(folder: str, progress: Callable[[int], None]) -> Iterator[TrainingRun]:
    """Open a checkpoint of ours; its files stay open until the context ends.

    Args:
        progress: told the bytes that were read and are right.

    Raises:
        UsageError: it is damaged, or no checkpoint. UnsupportedError: a newer format, or weights whose packing is not
        known.
    """
    with open_checkpoint(folder, progress) as source:
        yield _run(source)


def _run(source: CheckpointSource) -> TrainingRun:
    described = source.training.get("optimizer")
    groups, small, kind = _groups(source, described) if described is not None else ([], {}, None)
    arrays: dict[str, dict[str, StoredTensor]] = {}
    for full, array in source.arrays.items():
        name, _, key = full.rpartition(".")
        arrays.setdefault(name, {})[key] = array
        if is_packed_key(key):
            raise UnsupportedError(
                f"{source.folder}: the optimizer ({kind}) keeps tensors of other shapes than the parameter's ({full}), "
                "which no other format has; load the folder by TrainingState and save optimizer.state_dict()"
            )
    packed = not arrays.keys() <= source.weights.keys()
    packing = packing_of(source.folder) if packed else None
    weights = dict(source.weights) if packing is None else _unpacked(source, packing)
    lacking = sorted(arrays.keys() - weights.keys())
    if lacking:
        raise UsageError(f"{source.folder} has optimizer state of {', '.join(lacking[:_NAMES_SHOWN])}, and no weights")
    whole = _OneWholeTensor()
    masters: dict[str, Values] = {}
    moments: dict[str, dict[str, Values]] = {}
    for name, held in arrays.items():
        param = _stored_param(name, held, weights[name])
        read = _ParamReader(param, source.blocks, source.manifest.files, whole)
        if LEADS & held.keys():
            masters[name] = Computed(torch.float32, param.shape, read.master)
        moments[name] = {key: Computed(torch.float32, param.shape, partial(read.array, key)) for key in param.keys}
    step, others = source.manifest.step, source.training.get("others")
    made = TrainingRun(
        source="deepoffload",
        step=step,
        weights={name: _stored_weight(tensor) for name, tensor in weights.items()},
        masters=masters,
        aliases=_aliases(source) if packing is None else packing.aliases,
        kind=kind,
        groups=groups,
        arrays={name: held for name, held in moments.items() if held},
        small=small,
        others=others if isinstance(others, dict) else {},
        client_state=source.training.get("client_state"),
        config_files=_config_files(source),
    )
    return made if packing is None else replace(made, as_on_hub=_packed(made, packing, source))


class _OneWholeTensor:
    """The one tensor that is whole in memory: of those that are stored in another order than row-major."""

    def __init__(self) -> None:
        self._key: object = None
        self._values: Tensor | None = None

    def values_of(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gave when the same key was asked for last time, or gives now."""
        if self._values is None or key != self._key:
            self._values = None
            self._key, self._values = key, make()
        return self._values


@dataclass(frozen=True)
class _ParamReader:
    """Reads a parameter's master and arrays in row-major order, in windows that follow one another."""

    param: StoredParam
    reader: BlockReader
    files: Collection[str]
    whole: _OneWholeTensor

    def master(self, start: int, numel: int) -> Tensor:
        total = math.prod(self.param.shape)
        if any(not self.param.lies_as_stored(key) for key in LEADS & self.param.arrays.keys()):
            values = self.whole.values_of(
                (self.param.name, "master"), lambda: self._forgotten(self.param.master(0, total))
            )
            return values[start : start + numel]
        if start == 0:
            step = PIECE_BYTES // torch.float32.itemsize
            self._will_read(
                span for at in range(0, total, step) for span in self.param.weight_spans(at, min(step, total - at))
            )
        return self.param.master(start, numel)

    def array(self, key: str, start: int, numel: int) -> Tensor:
        stored = self.param.arrays[key]
        if not self.param.lies_as_stored(key):
            values = self.whole.values_of(
                (self.param.name, key), lambda: self._forgotten(self.param.whole(key).view(-1))
            )
            return values[start : start + numel]
        if start == 0:
            self._will_read([stored.span(0, stored.record.numel)])
        return self.param.fp32(key, start, numel)

    def _will_read(self, spans: Iterable[FileSpan]) -> None:
        """What lies in files; what is put together of several stored tensors is not read ahead."""
        self.reader.will_read(span for span in spans if span.file in self.files)

    def _forgotten(self, values: Tensor) -> Tensor:
        self.param.forget()
        return values


def _unpacked(source: CheckpointSource, packing: Packing) -> dict[str, StoredTensor]:
    """The stored weights as the tensors of the model."""
    found: dict[str, StoredTensor] = {}
    for name, shape in packing.shapes.items():
        runs = packing.runs_of[name]
        at = 0
        for run in runs:
            if run.stored not in source.weights or run.start != at:
                raise UsageError(f"{source.folder}: the stored weights do not make up {name}: {run.stored} is missing")
            at += run.numel
        fragments = [Fragment(_stored_weight(source.weights[run.stored]), run.stored_start, run.numel) for run in runs]
        if at != math.prod(shape) or len({fragment.values.dtype for fragment in fragments}) > 1:
            raise UsageError(f"{source.folder}: the stored weights do not make up {name}")
        found[name] = ValuesTensor(name, len(found), Joined(shape, fragments), lambda nbytes: None)
    return found


def _packed(run: TrainingRun, packing: Packing, source: CheckpointSource) -> dict[str, Values]:
    """The weights in their best precision, as they are stored."""
    found: dict[str, Values] = {}
    for stored, runs in packing.runs.items():
        fragments = [Fragment(run.exact(part.name), part.start, part.numel) for part in runs]
        found[stored] = Joined(source.weights[stored].shape, fragments)
    return found


def _stored_param(name: str, arrays: Mapping[str, StoredTensor], weight: StoredTensor) -> StoredParam:
    shape = weight.shape
    return StoredParam(name, shape, row_major_stride(shape), None, arrays, weight, weight.dtype, lambda: None)


def _stored_weight(tensor: StoredTensor) -> Computed:
    if tensor.record.order is None:
        return Computed(tensor.dtype, tensor.shape, tensor.read)

    def read(start: int, numel: int) -> Tensor:
        return tensor.whole().reshape(-1)[start : start + numel]

    return Computed(tensor.dtype, tensor.shape, read)


def _groups(
    source: CheckpointSource, described: Any
) -> tuple[list[GroupOfParams], dict[str, dict[str, Any]], str | None]:
    try:
        settings, names = described["groups"], described["params"]
        groups = [GroupOfParams(dict(group), list(mine)) for group, mine in zip(settings, names, strict=True)]
        small = {str(name): dict(state) for name, state in described["states"].items()}
        kind = str(described["kind"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{source.folder} is damaged: it does not describe its optimizer ({error!r})") from error
    for name in (name for group in groups for name in group.names):
        if not isinstance(name, str):
            raise UsageError(f"{source.folder} is damaged: a parameter of its optimizer has no name")
    return groups, small, kind


def _aliases(source: CheckpointSource) -> dict[str, str]:
    """Tied names, as the weight files note them."""
    found = {}
    for file in source.manifest.files:
        if not is_weight_file(file) or file == INDEX_NAME:
            continue
        with open(os.path.join(source.folder, file), "rb") as opened:  # its header has been compared with the manifest
            header = parse_json(opened.read(int.from_bytes(opened.read(8), "little")), file)
        for name, kept in header.get("__metadata__", {}).items():
            if kept in source.weights and name not in source.weights:
                found[name] = kept
    return found


def _config_files(source: CheckpointSource) -> dict[str, bytes]:
    found = {}
    for file, record in source.manifest.files.items():
        small = file.endswith((".json", ".py", ".txt", ".model", ".jinja")) and record.nbytes <= _CONFIG_BYTES_MAX
        if small and file not in (TRAINING_NAME, INDEX_NAME):
            found[file] = source.blocks.content(file)
    return found


def config_of_type(name: str, content: bytes, dtype: torch.dtype) -> bytes:
    """``config.json`` that says that the weights are of ``dtype``; any other file as it is."""
    if name != "config.json":
        return content
    config = parse_json(content, name)
    if isinstance(config, dict):
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
