"""The files of ``torch.distributed.checkpoint``: ``.metadata``, a pickle that says where each tensor lies, and
``*.distcp``, in which every tensor or value is an archive of ``torch.save``.

Names are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``: ``model.<name>``,
``optimizer.state.<parameter>.<key>`` and ``optimizer.param_groups.<index>.<setting>``.
(torch 2.13: ``distributed/checkpoint/filesystem.py``, ``metadata.py``.)
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepoffload.checkpoint.convert.archive import ByteSource
from deepoffload.checkpoint.convert.completeness import check_complete
from deepoffload.checkpoint.convert.deepspeed_files import STEP, kind_of_arrays, listing, number, tensor
from deepoffload.checkpoint.convert.pickle_reader import Record, read_pickle
from deepoffload.checkpoint.convert.plain import PlainValues
from deepoffload.checkpoint.convert.tensors import Values, in_fp32
from deepoffload.checkpoint.convert.torch_reader import NAMED_DTYPES, PICKLE_BYTES_MAX, TorchFile
from deepoffload.checkpoint.convert.training_run import GroupOfParams, TrainingRun
from deepoffload.errors import UnsupportedError, UsageError

log = logging.getLogger("deepoffload")

METADATA = ".metadata"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_MODEL = "model."
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."
_OPTIMIZER = "optimizer."
_MODULE = "torch.distributed.checkpoint"
_DIMS_MAX = 64


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], Values]

    def has(self, place: Sequence[int]) -> bool:
        return all(0 <= at - offset < size for at, offset, size in zip(place, self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class _Chunked:
    """A tensor that is put together of its blocks, run by run of elements that follow one another in both."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[_Chunk]

    def read(self, start: int, numel: int) -> Tensor:
        runs = []
        while numel > 0:
            place = _place(start, self.shape)
            chunk = next((chunk for chunk in self.chunks if chunk.has(place)), None)
            if chunk is None:
                raise UsageError(
                    f"a tensor of shape {self.shape} has no chunk at {place}: the checkpoint is incomplete"
                )
            inside = [at - offset for at, offset in zip(place, chunk.offsets, strict=True)]
            count = min(numel, _run_length(inside, chunk.sizes, self.shape))
            values = chunk.open().read(_index(inside, chunk.sizes), count)
            if values.dtype is not self.dtype or values.numel() != count:
                raise UsageError("a chunk is of another type than its tensor: the checkpoint is damaged")
            runs.append(values)
            start, numel = start + count, numel - count
        return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else torch.empty(0, dtype=self.dtype)


def _place(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


def _index(place: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for at, size in zip(place, shape, strict=True):
        index = index * size + at
    return index


def _run_length(inside: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Elements from ``inside`` on that follow one another in the chunk and in the tensor."""
    length = 1
    for dim in reversed(range(len(sizes))):
        length = (sizes[dim] - inside[dim] - 1) * math.prod(sizes[dim + 1 :]) + length
        if sizes[dim] != shape[dim]:
            break
    return length


class _Items:
    """What ``.metadata`` says of the items, and the items.

    Attributes:
        tensors: by name. values: names of the rest.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        path = os.path.join(directory, METADATA)
        if not os.path.lexists(path):
            raise UsageError(
                f"{directory} has no file {METADATA}: it is no checkpoint of torch.distributed.checkpoint; give the "
                "folder that was its checkpoint_id"
            )
        source = ByteSource(path)
        if source.nbytes > PICKLE_BYTES_MAX:
            raise UsageError(f"{source.path} has {source.nbytes} bytes; at most {PICKLE_BYTES_MAX} are read")
        builders: dict[tuple[str, str], Any] = {("torch", "Size"): lambda args: tuple(args[0])}
        found = read_pickle(source.read(0, source.nbytes), source.path, builders, dict(NAMED_DTYPES))
        items = found.field("state_dict_metadata") if isinstance(found, Record) else None
        places = found.field("storage_data") if isinstance(found, Record) else None
        if not isinstance(items, dict) or not isinstance(places, dict):
            raise UsageError(f"{source.path} is no metadata of torch.distributed.checkpoint's files")
        self._places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, place in places.items():
            name = index.field("fqn") if isinstance(index, Record) else None
            if type(name) is not str or not isinstance(index, Record) or not isinstance(place, Record):
                raise UsageError(f"{source.path} is damaged: it has a place of what has no name")
            offset = index.field("offset")
            self._places[name, None if offset is None else _dims(offset, name)] = place
        self.tensors: dict[str, _Chunked] = {}
        self.values: list[str] = []
        for name, item in items.items():
            if type(name) is not str or not isinstance(item, Record):
                raise UsageError(f"{source.path} is damaged: it has an item without a name")
            if item.kind.name == "TensorStorageMetadata":
                self.tensors[name] = self._tensor(name, item)
            else:
                self.values.append(name)

    def _tensor(self, name: str, item: Record) -> _Chunked:
        properties, shape = item.field("properties"), _dims(item.field("size"), name)
        state = properties.state if isinstance(properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"{self.directory}: {name[:80]} has no dtype")
        chunks = []
        for chunk in listing(item.field("chunks"), f"{self.directory}: the chunks of {name[:80]}"):
            if not isinstance(chunk, Record):
                raise UsageError(f"{self.directory}: {name[:80]} has a chunk that is none")
            offsets, sizes = _dims(chunk.field("offsets"), name), _dims(chunk.field("sizes"), name)
            if not len(offsets) == len(sizes) == len(shape) or any(
                offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise UsageError(f"{self.directory}: {name[:80]} has a chunk that does not lie in it")
            chunks.append(_Chunk(offsets, sizes, self._opener(name, offsets)))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise UsageError(f"{self.directory}: the chunks of {name[:80]} do not make up its shape {shape}")
        return _Chunked(dtype, shape, chunks)

    def _opener(self, name: str, offsets: tuple[int, ...]) -> Callable[[], Values]:
        opened: list[Values] = []

        def open_chunk() -> Values:
            if not opened:
                opened.append(tensor(self._archive(name, offsets).value, name))
            return opened[0]

        return open_chunk

    def value(self, name: str) -> Any:
        """An item that is no tensor."""
        return self._archive(name, None).value

    def _archive(self, name: str, offsets: tuple[int, ...] | None) -> TorchFile:
        place = self._places.get((name, offsets))
        if place is None:
            raise UsageError(f"{self.directory}: {METADATA} does not say where {name[:80]} lies")
        if place.field("transform_descriptors"):
            raise UnsupportedError(f"{self.directory}: {name[:80]} is stored in a transformed way (compressed)")
        path, offset, length = (place.field(key) for key in ("relative_path", "offset", "length"))
        if type(path) is not str or not _FILE_NAME.fullmatch(path):
            shown = repr(path[:80]) if type(path) is str else f"a {type(path).__name__}"
            raise UsageError(f"{self.directory}: {shown} cannot be a file of it")
        if type(offset) is not int or type(length) is not int:
            raise UsageError(f"{self.directory}: {METADATA} does not say where {name[:80]} lies")
        return TorchFile(ByteSource(os.path.join(self.directory, path)).part(offset, length), name)


def _dims(value: Any, name: str) -> tuple[int, ...]:
    dims = value if isinstance(value, tuple) else (-1,)
    if len(dims) > _DIMS_MAX or any(type(dim) is not int or not 0 <= dim < 1 << 60 for dim in dims):
        raise UsageError(f"{name[:80]} has an impossible shape")
    return dims


# -- reading ---------------------------------------------------------------------------------------------------------


def read_dcp(directories: Sequence[str]) -> TrainingRun:
    """A checkpoint of ``torch.distributed.checkpoint.save`` with its own files; several directories (one for the model,
    one for the optimizer) are read as one.

    Raises:
        UsageError: it is incomplete or damaged. UnsupportedError: transformed storage, or an unknown optimizer.
    """
    tensors: dict[str, _Chunked] = {}
    values: dict[str, Callable[[], Any]] = {}
    for directory in directories:
        storage = _Items(directory)
        tensors.update(storage.tensors)
        values.update({name: _reader(storage, name) for name in storage.values})
    plain = not any(name.startswith((_MODEL, _OPTIMIZER)) for name in (*tensors, *values))
    prefix = "" if plain else _MODEL
    weights = {name.removeprefix(prefix): held for name, held in tensors.items() if name.startswith(prefix)}
    if plain:
        log.warning("%s: no name begins with %r, so all its tensors are taken for weights", directories[0], _MODEL)
    if not weights:
        raise UsageError(f"{directories[0]} has no weights: names of a model begin with {_MODEL!r}")
    arrays: dict[str, dict[str, Values]] = {}
    small: dict[str, dict[str, Any]] = {}
    notes = PlainValues(directories[0])
    for name in (*tensors, *values):
        if not name.startswith(_STATE):
            continue
        param, _, key = name.removeprefix(_STATE).rpartition(".")
        if name in tensors and tensors[name].shape:
            arrays.setdefault(param, {})[key] = in_fp32(tensors[name])
        else:
            value = tensors[name].read(0, 1).item() if name in tensors else values[name]()
            small.setdefault(param, {})[key] = notes.of(value, name)
    groups = _groups(values, notes, [*weights], directories[0])
    _check_names(groups, weights, arrays, directories[0])
    steps = [int(number(state[STEP], "step")) for state in small.values() if STEP in state]
    others = {name: notes.of(values[name](), name) for name in values if not name.startswith((_MODEL, _OPTIMIZER))}
    notes.report()
    run = TrainingRun(
        source="torch.distributed.checkpoint",
        step=max(steps, default=0),
        weights=weights,
        kind=kind_of_arrays(arrays, [group.settings for group in groups]) if groups else None,
        groups=groups,
        arrays=arrays,
        small=small,
        client_state=others or None,
    )
    check_complete(run, directories[0])
    if arrays and not steps:
        log.warning("%s does not say how many steps were made: taken as 0", directories[0])
    return run


def _reader(storage: _Items, name: str) -> Callable[[], Any]:
    return lambda: storage.value(name)


_NUMBERED = (
    "{} has the optimizer's state by numbers of parameters, as optimizer.state_dict() gives it, and not by their "
    "names: save it again with what torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) gives, "
    "or get_optimizer_state_dict(model, optimizer) for the optimizer alone"
)


def _groups(
    values: Mapping[str, Callable[[], Any]], notes: PlainValues, weights: Sequence[str], where: str
) -> list[GroupOfParams]:
    by_key: dict[str, dict[str, Any]] = {}
    for name in values:
        if name.startswith(_GROUPS):
            owner, _, setting = name.removeprefix(_GROUPS).rpartition(".")
            by_key.setdefault(owner, {})[setting] = notes.of(values[name](), name)
    if all(owner.isdecimal() and len(owner) < 6 for owner in by_key):
        groups = []
        for owner in sorted(by_key, key=int):
            settings = by_key[owner]
            names = listing(settings.pop("params", []), f"the parameters of group {owner}")
            if any(type(name) is int for name in names):
                raise UsageError(_NUMBERED.format(where))
            groups.append(GroupOfParams(settings, [name for name in names if isinstance(name, str)]))
        return groups
    alike: dict[str, GroupOfParams] = {}  # settings by parameter, as get_state_dict flattens them
    for owner in sorted(by_key, key=lambda name: weights.index(name) if name in weights else len(weights)):
        group = alike.setdefault(repr(sorted(by_key[owner].items())), GroupOfParams(by_key[owner], []))
        group.names.append(owner)  # type: ignore[attr-defined]
    return list(alike.values())


def _check_names(
    groups: Sequence[GroupOfParams], weights: Mapping[str, Values], arrays: Mapping[str, Any], where: str
) -> None:
    named = {name for group in groups for name in group.names}
    strange = sorted((named | arrays.keys()) - weights.keys()) or sorted(arrays.keys() - named)
    if strange and all(name.isdecimal() for name in strange):
        raise UsageError(_NUMBERED.format(where))
    if strange:
        raise UsageError(f"{where} has optimizer state of {', '.join(strange[:5])}, which is no parameter of a group")
