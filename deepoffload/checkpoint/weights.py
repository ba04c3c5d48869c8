"""What of a model is saved, under which names, and what each stored tensor is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.expressions import Expressions, Opener
from deepoffload.checkpoint.safetensors_file import Entry, check_dtype, header_bytes, in_file_order
from deepoffload.checkpoint.shards import Layout
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.memory.block import Block, can_hide, is_backed
from deepoffload.params.pager import Pager
from deepoffload.params.passage import Passage
from deepoffload.params.torch_private import count_change, get_data, outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.schedule.block_state import BlockState
from deepoffload.tiling.joined import parts_of

WINDOW_BYTES = 4 << 20
"""Bytes written at a time, and the most that is copied at a time where memory order is not file order."""


class HasModule(Protocol):
    """What ``initialize`` returns first: an engine around a module."""

    @property
    def module(self) -> nn.Module: ...


@dataclass(frozen=True)
class WeightPlan:
    """The stored tensors of a model.

    Attributes:
        tensors: stand-ins of them by name; ``expressions`` knows what each is made of.
        entries: them in the order in which they are written.
        metadata: of the files; names that tied weights are not stored under, with those that they are.
    """

    expressions: Expressions
    tensors: Mapping[str, Tensor]
    entries: list[Entry]
    metadata: Mapping[str, str]
    num_parameters: int

    def check_headers(self, layout: Layout) -> None:
        """Let show what is wrong with names and types before a file is made."""
        for shard in layout.files.values():
            header_bytes(shard, self.metadata)


def unwrapped(model: nn.Module | HasModule, who: str) -> nn.Module:
    """The module of an engine or of ``torch.compile``'s wrapper."""
    module = model if isinstance(model, nn.Module) else getattr(model, "module", model)
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{who} takes a torch.nn.Module, not {type(model).__name__}")
    return module


def plan_weights(
    module: nn.Module,
    *,
    hub_names: bool,
    left_out: Set[str] = frozenset(),
    opener_of: Callable[[Tensor], Opener] | None = None,
    shapes_only: bool = False,
    apart: bool = False,
) -> WeightPlan:
    """The files' tensors and what each is made of. Reads no weight.

    Args:
        hub_names: names and packing as on the hub, for a model of transformers.
        left_out: names of the state dict that are not stored.
        opener_of: gives the values of a tensor of the state dict; to be read when not said.
        shapes_only: the model may be on the meta device: nobody asks for values.
        apart: tiles of a layer have the names that parameters have, instead of the layer's.

    Raises:
        UnsupportedError: something that safetensors files cannot hold. ClosedError: the model's engine is closed.
    """
    metadata = {"format": "pt"}
    expressions = Expressions()
    ignored = {*left_out, *(transformers_format.ignored_names(module) if hub_names else ())}
    state = _checked_state(module, ignored, shapes_only=shapes_only)
    state = _apart(module, state) if apart else state
    for names in names_of_shared(state):
        if hub_names:
            dropped = transformers_format.droppable_names(module, names)
        else:
            dropped = set(names[1:])
        kept = next(name for name in names if name not in dropped)
        metadata.update(dict.fromkeys(sorted(dropped), kept))  # as safetensors.torch.save_model notes it
        for name in dropped:
            del state[name]
    with outside_user_modes():
        opener_of = opener_of or WeightOpener(to_write=False).opener_of
        tensors = {name: _stand_in(expressions, value, opener_of) for name, value in state.items()}
        with expressions:
            stored = transformers_format.as_on_disk(module, tensors) if hub_names else tensors
    entries = in_file_order(_entry(expressions, name, tensor) for name, tensor in stored.items())
    return WeightPlan(expressions, stored, entries, metadata, sum(param.numel() for param in module.parameters()))


def named_values(module: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the state dict under one name: that under which :func:`plan_weights` has it without
    ``hub_names``, and with ``apart``.

    Raises:
        As :func:`plan_weights`.
    """
    state = _apart(module, _checked_state(module, frozenset(), shapes_only=False))
    for names in names_of_shared(state):
        for name in names[1:]:
            del state[name]
    return state


def _apart(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which the tiles of a layer have the names that parameters have."""
    names = {id(param): name for name, param in module.named_parameters()}
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = parts_of(value)
        found.update({name: value} if parts is None else {names[id(part)]: part for part in parts})
    return found


def _checked_state(module: nn.Module, ignored: Set[str], *, shapes_only: bool) -> dict[str, Tensor]:
    state = dict(_flat(module.state_dict(keep_vars=True), ""))
    for name in ignored & state.keys():
        del state[name]
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name} is a {type(value).__name__} (extra state of a module); safetensors files hold tensors only"
            )
        check_dtype(name, value.dtype)
        if (value.is_meta and not shapes_only) or value.layout is not torch.strided:
            raise UnsupportedError(f"{name} ({value.layout}, on {value.device}) has no plain values to save")
        for part in parts_of(value) or (value,):
            handle = handle_of(part)
            if handle is not None and handle.pager.life.closed_because is not None:
                handle.pager.life.refuse_closed(handle.name)
    return state


def _flat(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and values, where models give a mapping for each part, as Megatron's do while they save."""
    for name, value in state.items():
        if isinstance(value, Mapping) and not name.endswith("_extra_state"):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def names_of_shared(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of two and more names that stand for the same tensor, each in the order of the state dict."""
    groups: dict[object, list[str]] = {}
    for name, value in state.items():
        parts = parts_of(value)
        same: object = id(value if parts is None else parts[0])
        if parts is None and handle_of(value) is None and value.numel() and not value.is_meta:
            same = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        groups.setdefault(same, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def handle_of(value: Tensor) -> ParamHandle | None:
    """What deepoffload knows of a parameter; None for an ordinary tensor."""
    slot = value.__dict__.get("_slot")
    return slot if isinstance(slot, ParamHandle) else None


def _stand_in(expressions: Expressions, value: Tensor, opener_of: Callable[[Tensor], Opener]) -> Tensor:
    parts = parts_of(value)
    if parts is not None:
        stand_ins = [_stand_in(expressions, part, opener_of) for part in parts]
        with expressions:
            return torch.cat(stand_ins)
    handle = handle_of(value)
    if handle is not None:
        return expressions.source(handle.shape, handle.stride, handle.dtype, opener_of(value))
    data = get_data(value)
    return expressions.source(data.shape, data.stride(), data.dtype, opener_of(value))


def _entry(expressions: Expressions, name: str, tensor: Tensor) -> Entry:
    def pieces() -> Iterator[Tensor]:
        return map(Tensor.cpu, expressions.pieces(tensor, WINDOW_BYTES))  # which keeps none of them

    check_dtype(name, tensor.dtype)
    return Entry(name, tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size(), pieces)


# -- the values ------------------------------------------------------------------------------------------------------


Target = ParamHandle | Tensor
"""A paged parameter, or an ordinary tensor."""


class WeightOpener:
    """Opens tensors of a state dict, about in the order in which their openers were asked for: the disk works on those
    to come and those before meanwhile.

    Args:
        to_write: all of a tensor or a part is going to be written; else it is read.

    Attributes:
        targets: what each opener opens.
    """

    def __init__(self, *, to_write: bool) -> None:
        self.targets: dict[Opener, Target] = {}
        self._to_write = to_write
        self._passages: dict[Pager, Passage] = {}

    def opener_of(self, value: Tensor) -> Opener:
        handle = handle_of(value)
        made: Opener
        if handle is not None:
            made = partial(self._open, handle)
        else:
            made = partial(_plain_changing, value) if self._to_write else partial(_plain, get_data(value))
        self.targets[made] = value if handle is None else handle
        return made

    @contextmanager
    def _open(self, handle: ParamHandle) -> Iterator[Tensor]:
        pager = cast(Pager, handle.pager)
        if pager not in self._passages:
            self._passages[pager] = Passage(pager, self._blocks_of(pager))
        if handle.block is not None:
            self._passages[pager].at(handle.block)
        with _changing(handle) if self._to_write else _resident(handle) as data:
            yield data

    def _blocks_of(self, pager: Pager) -> Iterator[Block]:
        for target in self.targets.values():
            if isinstance(target, ParamHandle) and target.pager is pager and target.block is not None:
                yield target.block


def discard_replaced(written: Mapping[ParamHandle, int]) -> None:
    """Give up weights on NVMe of which every element is going to be written, so that they are not read for that. Those
    that a checkpoint backs are given up in memory, too: by now it may have other bytes, which may be the reason for
    the call. Then a read ahead of them fails.

    Args:
        written: elements of each parameter that are going to be.
    """
    for handle in written:
        unit, pager = handle.unit, cast(Pager, handle.pager)
        if unit is None or not (pager.memory.on_host or handle.cut is not None):
            continue
        with pager.lock:
            copies = pager.tiers.copies
            away = pager.tiers.is_away(unit.weights.id) or _is_unneeded(unit)
            unseen = copies is None or not copies.shows(unit.weights)
            if away and unseen and all(written.get(other) == other.numel for other in unit.handles):
                pager.tiers.discard(unit.weights)


def _is_unneeded(unit: Unit) -> bool:
    """Whether a checkpoint backs weights that nobody uses or refers to."""
    block = unit.weights
    unchanged = is_backed(block) and block.state in (BlockState.READING, BlockState.CLEAN)
    other_memory = any(handle.given() or handle.displaced() for handle in unit.handles)
    return unchanged and not block.leases and unit.pending is None and not other_memory and can_hide(unit.owner)


@contextmanager
def _plain(data: Tensor) -> Iterator[Tensor]:
    yield data


@contextmanager
def _plain_changing(value: Tensor) -> Iterator[Tensor]:
    yield value.detach()
    if not value.is_inference():
        count_change(value)


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
def _changing(handle: ParamHandle) -> Iterator[Tensor]:
    """The same, and what is written is no edit by the program: the weight is its own master until one is loaded."""
    with _resident(handle) as data:
        with handle.pager.lock:
            if handle.unit is not None:
                handle.unit.owner.changed()  # edits from before count for nothing
            handle.pager.will_change(handle)
        try:
            yield data
        finally:
            with handle.pager.lock:
                handle.count_update()  # graphs that have kept the old values must not go on
                handle.master_stale = True
                handle.rewritten()
