"""An optimizer's state by parts, for checkpoints: what lies in pieces, what in memory, the settings of its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.kinds import kind_of_class
from deepoffload.optim.state_dict import Group, match_groups
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StateFormat


@dataclass(frozen=True)
class OptimizerParts:
    """What an optimizer holds.

    Attributes:
        kind: optimizers of one kind can take over each other's state.
        groups: settings as ``state_dict()`` shows them, without parameters; ``params`` has those, group by group.
        in_pieces: keys of ``optimizer.state`` to fields of the pieces, for parameters whose arrays lie there.
        in_memory: the rest of ``optimizer.state``.
    """

    kind: str
    groups: list[Group]
    params: list[list[Tensor]]
    in_pieces: dict[ParamHandle, Mapping[str, str]] = field(default_factory=dict)
    in_memory: dict[Tensor, dict[str, Any]] = field(default_factory=dict)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """What has the same kind keeps the same arrays under the same names."""
    if isinstance(optimizer, HostOptimizer):
        return optimizer.kind
    return kind_of_class(type(optimizer))


def take_apart(optimizer: torch.optim.Optimizer) -> OptimizerParts:
    """The parts.

    Raises:
        UsageError: another optimizer has taken over a paged parameter. UnsupportedError: state of something that is no
        parameter.
    """
    params = [list(group["params"]) for group in optimizer.param_groups]
    if isinstance(optimizer, HostOptimizer):
        optimizer._held.move_into_pieces(optimizer)
        _follow_weights(optimizer)
        if optimizer.rule.foreign:  # its updates change what is in memory, too
            for pager in optimizer._pagers():
                pager.catch_up_all()
    parts = OptimizerParts(kind_of(optimizer), own_settings(optimizer), params)
    known = {id(param) for group in params for param in group}
    for key, state in optimizer.state.items():
        if not isinstance(key, Tensor):
            raise UnsupportedError(
                f"{type(optimizer).__name__} has state of a {type(key).__name__}, which is no parameter; a checkpoint "
                "holds state of parameters only"
            )
        if state and id(key) in known:  # what was taken out of all groups has none any more
            parts.in_memory[key] = dict(state)
    if isinstance(optimizer, HostOptimizer):
        parts.in_pieces.update(_arrays_in_pieces(optimizer))
    return parts


def _follow_weights(optimizer: HostOptimizer) -> None:
    """Masters of ordinary weights that the program has set since the last step become what the weights are."""
    for param, _ in optimizer._each():
        if not isinstance(param.__dict__.get("_slot"), ParamHandle) and param in optimizer.state:
            optimizer._ordinary.follow_weight(param, optimizer.state[param])


def _arrays_in_pieces(optimizer: HostOptimizer) -> Iterator[tuple[ParamHandle, Mapping[str, str]]]:
    for param, group in optimizer._each():
        handle = param.__dict__.get("_slot")
        if isinstance(handle, ParamHandle) and handle in optimizer._held:
            optimizer._held.refuse_lost(handle)
            yield handle, optimizer._arrays_of(param, group)


def now_in_pieces(optimizer: HostOptimizer, handle: ParamHandle) -> None:
    """The pieces hold this optimizer's arrays of a parameter."""
    optimizer._held.take(handle)


def own_settings(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Settings of the groups as ``state_dict()`` shows them, without parameters."""
    if isinstance(optimizer, HostOptimizer):
        return [_settings(optimizer._export_group(group)) for group in optimizer.param_groups]
    return [_settings(group) for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class PieceNeeds(NamedTuple):
    """What an optimizer wants of a parameter's pieces: keys of its state to fields, and the format."""

    arrays: Mapping[str, str]
    format: StateFormat


def needs_of_pieces(optimizer: HostOptimizer, groups: Sequence[Group]) -> dict[ParamHandle, PieceNeeds]:
    """For every paged parameter of ``groups``, whether or not a step was taken."""
    needs = {}
    for group in groups:
        for param in group["params"]:
            handle = param.__dict__.get("_slot")
            if isinstance(handle, ParamHandle):
                needs[handle] = PieceNeeds(optimizer._arrays_of(param, group), optimizer._format_of(param, group))
    return needs


def restored_groups(optimizer: torch.optim.Optimizer, saved: Sequence[Group]) -> list[Group]:
    """The groups with the settings of ``saved``, checked; changes nothing.

    Raises:
        ValueError: another number of groups, or a setting is out of range.
    """
    given = [{**group, "params": mine["params"]} for group, mine in zip(saved, optimizer.param_groups, strict=True)]
    if not isinstance(optimizer, HostOptimizer):
        return given
    groups = match_groups(optimizer.param_groups, given, optimizer._import_group)
    for group in groups:
        optimizer._check_group(group)
    return groups


def restore(
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    in_memory: Mapping[Tensor, dict[str, Any]],
    kept: Sequence[Tensor] = (),
) -> None:
    """Replace settings and what is in memory; arrays in pieces count as not there until :func:`now_in_pieces`.

    Args:
        kept: parameters whose arrays in pieces stay as they are.
    """
    if isinstance(optimizer, HostOptimizer):
        if kept:
            _follow_weights(optimizer)
        slots = [param.__dict__.get("_slot") for param in kept]
        held = [slot for slot in slots if isinstance(slot, ParamHandle) and optimizer._held.holds(slot)]
        state: defaultdict[Any, Any] = defaultdict(dict, {param: dict(entry) for param, entry in in_memory.items()})
        optimizer.__setstate__({"state": state, "param_groups": groups})
        for handle in held:
            now_in_pieces(optimizer, handle)
        return
    numbers: dict[int, int] = {}
    for group in groups:
        for param in group["params"]:
            numbers.setdefault(id(param), len(numbers))
    packed = {
        "state": {numbers[id(param)]: dict(entry) for param, entry in in_memory.items()},
        "param_groups": [{**group, "params": [numbers[id(param)] for param in group["params"]]} for group in groups],
    }
    optimizer.load_state_dict(packed)


def pagers_of(params: Sequence[Tensor]) -> list[Pager]:
    """The pagers of the parameters that have one."""
    found: dict[int, Pager] = {}
    for param in params:
        slot = param.__dict__.get("_slot")
        if isinstance(slot, ParamHandle) and isinstance(slot.pager, Pager):
            found[id(slot.pager)] = slot.pager
    return list(found.values())
