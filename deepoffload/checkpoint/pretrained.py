"""``save_pretrained``: a paged model as safetensors files in the Hugging Face layout, streamed inside the budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.directory import prepare, publish, staging, sync_file
from deepoffload.checkpoint.expressions import Expressions
from deepoffload.checkpoint.safetensors_file import Entry, check_dtype, header_bytes, in_file_order, write_file
from deepoffload.checkpoint.shards import INDEX_NAME, Layout, split
from deepoffload.config.units import format_bytes, parse_bytes
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.params.torch_private import get_data, outside_user_modes
from deepoffload.params.unit import ParamHandle

log = logging.getLogger("deepoffload")

WINDOW_BYTES = 4 << 20
"""Bytes written at a time, and the most that is copied at a time where memory order is not file order."""

PROGRESS_INTERVAL_S = 10.0

CONFIG_FILES_BYTES = 1 << 20
"""Room asked for in addition to the weights, for configuration files and the index."""


class HasModule(Protocol):
    """What ``initialize`` returns first: an engine around a module."""

    @property
    def module(self) -> nn.Module: ...


def save_pretrained(
    model: nn.Module | HasModule,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights (and, for models of transformers, the configuration) to ``directory``.

    Parameters are fetched one unit at a time and written from where they lie, so that memory stays within the budget
    plus a few MiB. Names and packing are those of the checkpoint format, so ``from_pretrained`` and every other reader
    of safetensors can load the files. Weights have the dtype they compute in. Tied weights are stored once. The files
    appear when all of them are complete; a save that fails or is killed leaves an earlier one as it was.

    Args:
        model: any module, paged in part, in whole or not at all; also what ``initialize`` returns.
        directory: made when it does not exist.
        max_shard_size: bytes, or text such as ``"5GB"``; larger models are split, with an index.
        safe_serialization: only True: pickled files would need all weights in memory.

    Raises:
        UsageError: the directory or an argument cannot be used. UnsupportedError: what the format cannot hold,
        quantized models, adapters. IoFailure: the disk is full or failed. ClosedError: the model's engine is closed.
    """
    if not safe_serialization:
        raise UnsupportedError(
            "safe_serialization=False would pickle the whole model from memory; leave it out: safetensors files are "
            "written in pieces, and torch and transformers read them"
        )
    module = _unwrapped(model)
    target = os.path.abspath(os.fspath(directory))
    layout, metadata = _plan(module, _shard_bytes(max_shard_size))
    prepare(target, layout.total_bytes + CONFIG_FILES_BYTES)
    progress = _Progress(layout.total_bytes, target)
    with staging(target) as staged:
        if transformers_format.is_pretrained_model(module):
            transformers_format.write_config_files(module, staged)
        if layout.index is not None:
            with open(os.path.join(staged, INDEX_NAME), "w", encoding="utf-8") as file:
                file.write(layout.index)
        for name in os.listdir(staged):
            sync_file(os.path.join(staged, name))
        with outside_user_modes():
            for name, entries in layout.files.items():
                write_file(os.path.join(staged, name), entries, metadata, progress.advance)
        publish(staged, target)
    progress.done(len(layout.files))


def _unwrapped(model: nn.Module | HasModule) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", model)
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper
    if not isinstance(module, nn.Module):
        raise UsageError(f"save_pretrained takes a torch.nn.Module, not {type(model).__name__}")
    transformers_format.refuse_what_is_not_plain(module)
    return module


def _shard_bytes(max_shard_size: int | str) -> int:
    try:
        nbytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise UsageError(f"max_shard_size: {error}") from error
    if nbytes < 1:
        raise UsageError("max_shard_size has to be positive")
    return nbytes


# -- what is saved ---------------------------------------------------------------------------------------------------


def _plan(module: nn.Module, max_shard_bytes: int) -> tuple[Layout, Mapping[str, str]]:
    """The files and what each tensor in them is made of. Reads no weight."""
    metadata = {"format": "pt"}
    expressions = Expressions()
    from_transformers = transformers_format.is_pretrained_model(module)
    ignored = transformers_format.ignored_names(module) if from_transformers else frozenset()
    state = {name: value for name, value in module.state_dict(keep_vars=True).items() if name not in ignored}
    _check(state)
    for names in _names_of_shared(state):
        if from_transformers:
            dropped = transformers_format.droppable_names(module, names)
        else:
            dropped = set(names[1:])
            metadata.update(dict.fromkeys(dropped, names[0]))  # as safetensors.torch.save_model notes it
        for name in dropped:
            del state[name]
    with outside_user_modes():
        tensors = {name: _stand_in(expressions, value) for name, value in state.items()}
        with expressions:
            stored = transformers_format.as_on_disk(module, tensors) if from_transformers else tensors
    entries = in_file_order(_entry(expressions, name, tensor) for name, tensor in stored.items())
    layout = split(entries, max_shard_bytes, sum(param.numel() for param in module.parameters()))
    for shard in layout.files.values():
        header_bytes(shard, metadata)  # raises for wrong names and types before a file is made
    return layout, metadata


def _check(state: Mapping[str, object]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name} is a {type(value).__name__} (extra state of a module); safetensors files hold tensors only"
            )
        check_dtype(name, value.dtype)
        if value.is_meta or value.layout is not torch.strided:
            raise UnsupportedError(f"{name} ({value.layout}, on {value.device}) has no plain values to save")
        handle = _handle_of(value)
        if handle is not None and handle.pager.life.closed_because is not None:
            handle.pager.life.refuse_closed(handle.name)


def _names_of_shared(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of two and more names that stand for the same tensor, each in the order of the state dict."""
    groups: dict[object, list[str]] = {}
    for name, value in state.items():
        same: object = id(value)
        if _handle_of(value) is None and value.numel():
            same = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        groups.setdefault(same, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _handle_of(value: Tensor) -> ParamHandle | None:
    slot = value.__dict__.get("_slot")
    return slot if isinstance(slot, ParamHandle) else None


def _stand_in(expressions: Expressions, value: Tensor) -> Tensor:
    handle = _handle_of(value)
    if handle is not None:
        return expressions.source(handle.shape, handle.stride, handle.dtype, partial(_resident, handle))
    data = get_data(value)
    return expressions.source(data.shape, data.stride(), data.dtype, partial(_plain, data))


@contextmanager
def _resident(handle: ParamHandle) -> Iterator[Tensor]:
    """The bytes of a paged parameter, held in memory meanwhile."""
    handle.pager.pin(handle)
    try:
        param = handle.tensor
        if param is None:
            raise RuntimeError(f"{handle.name} was deleted while it is being saved")
        yield get_data(param)  # an alias of what is shown: unlike a view of our own, it keeps the block where it is
    finally:
        handle.pager.unpin(handle)


@contextmanager
def _plain(data: Tensor) -> Iterator[Tensor]:
    yield data


def _entry(expressions: Expressions, name: str, tensor: Tensor) -> Entry:
    def pieces() -> Iterator[Tensor]:
        for piece in expressions.pieces(tensor, WINDOW_BYTES):
            yield piece.cpu()

    check_dtype(name, tensor.dtype)
    return Entry(name, tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size(), pieces)


# -- telling about it ------------------------------------------------------------------------------------------------


class _Progress:
    """A line in the log every few seconds, and one at the end."""

    def __init__(self, total_bytes: int, target: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.target = target
        self.clock = clock
        self.written_bytes = 0
        self.started = self.said = clock()

    def advance(self, nbytes: int) -> None:
        self.written_bytes += nbytes
        now = self.clock()
        if now - self.said >= PROGRESS_INTERVAL_S:
            self.said = now
            share = self.written_bytes / max(1, self.total_bytes)
            log.info("saving to %s: %s, %.0f %%", self.target, format_bytes(self.written_bytes), 100 * share)

    def done(self, files: int) -> None:
        seconds = max(self.clock() - self.started, 1e-9)
        log.info(
            "saved %s in %d file%s to %s: %.1f s, %s/s",
            format_bytes(self.total_bytes),
            files,
            "" if files == 1 else "s",
            self.target,
            seconds,
            format_bytes(int(self.total_bytes / seconds)),
        )
