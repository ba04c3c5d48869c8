"""Compares the optimizer of a checkpoint with the one that it is loaded into; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deepoffload.checkpoint.source import TrainingSource
from deepoffload.checkpoint.stored_param import StoredParam
from deepoffload.checkpoint.values import clipped
from deepoffload.checkpoint.weights_loading import listed
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.optimizer_parts import kind_of, needs_of_pieces, own_settings, restored_groups
from deepoffload.optim.state_dict import Group


@dataclass(frozen=True)
class MatchedOptimizer:
    """State of a checkpoint that fits an optimizer.

    Attributes:
        groups: the optimizer's with the settings of the checkpoint; None: the optimizer stays as it is.
        small: what is no array, by parameter.
        kept: parameters that the checkpoint does not have: their state stays as it is.
    """

    groups: list[Group] | None = None
    small: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    kept: Set[str] = frozenset()


class _MisfitError(Exception):
    """What does not fit."""


class _SavedGroup(NamedTuple):
    settings: Any
    names: list[str]


def match_optimizer(
    source: TrainingSource,
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[int, str],
    by_param: Mapping[int, StoredParam],
    *,
    strict: bool,
    allows: str,
) -> MatchedOptimizer:
    """What of a checkpoint goes into an optimizer.

    Args:
        names: of the model's parameters, as checkpoints have them; those of tiles are one.
        by_param: what the checkpoint has of each. Both by ``id``.
        strict: False: the state of parameters that only one side has is left alone.
        allows: what would allow an optimizer that does not fit: the end of errors.

    Raises:
        UsageError: with the list of what does not fit and what would allow it.
    """
    saved = source.training.get("optimizer")
    if saved is None and optimizer is None:
        return MatchedOptimizer()
    if saved is None or optimizer is None:
        which = "the checkpoint has no optimizer" if saved is None else "there is no optimizer to load into"
        raise UsageError(f"{which}; {allows}")
    try:
        return _matched(saved, optimizer, names, by_param, strict=strict)
    except _MisfitError as error:
        raise UsageError(f"{error}; {allows}") from error.__cause__
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{source.folder} is damaged: it does not describe its optimizer ({clipped(repr(error))})"
        ) from error


def _matched(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    by_param: Mapping[int, StoredParam],
    *,
    strict: bool,
) -> MatchedOptimizer:
    kind, small = saved["kind"], saved["states"]
    if kind != kind_of(optimizer):
        raise _MisfitError(
            f"the checkpoint has the state of another optimizer: {clipped(str(kind))}, and this is "
            f"{type(optimizer).__name__} ({kind_of(optimizer)})"
        )
    theirs = [_SavedGroup(group, list(names)) for group, names in zip(saved["groups"], saved["params"], strict=True)]
    own = [
        list(dict.fromkeys(names.get(id(param), "") for param in group["params"])) for group in optimizer.param_groups
    ]
    kept: Set[str] = frozenset()
    settings: list[Any] = [group.settings for group in theirs]
    if strict:
        _match_groups([group.names for group in theirs], own)
    else:
        kept = _lacking(theirs, own, names, by_param)
        settings = _match_common(theirs, own, own_settings(optimizer), set(names.values()), kept)
    try:
        groups = restored_groups(optimizer, settings)
    except (ValueError, UnsupportedError) as error:
        raise _MisfitError(
            f"the optimizer cannot have the settings of the checkpoint: {clipped(str(error))}"
        ) from error
    if isinstance(optimizer, HostOptimizer):
        _match_arrays(optimizer, groups, small, by_param)
    states = {name: _checked_state(state) for name, state in small.items()}
    return MatchedOptimizer(groups, states, kept)


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    found = {str(key): value for key, value in state.items()}
    if "step" in found:
        float(found["step"])
    return found


def _lacking(
    theirs: Iterable[_SavedGroup],
    own: Iterable[Sequence[str]],
    names: Mapping[int, str],
    by_param: Mapping[int, StoredParam],
) -> Set[str]:
    """Parameters of which the checkpoint has neither the weight nor any state."""
    saved = {name for group in theirs for name in group.names}
    found = {name for group in own for name in group if name and name not in saved}
    stored = {name: by_param.get(key) for key, name in names.items() if name in found}
    return {name for name, each in stored.items() if each is None or each.weight_dtype is None}


def _match_common(
    theirs: list[_SavedGroup],
    own: list[list[str]],
    own_groups: Sequence[Group],
    known: Set[str],
    kept: Set[str],
) -> list[Any]:
    """The settings of each group, where only parameters that both sides have are compared.

    Where one side has more groups, those in which it has nothing in common with the other are left alone.
    """
    compared = list(range(len(own)))
    if len(theirs) != len(own):
        theirs = [group for group in theirs if not group.names or not known.isdisjoint(group.names)]
        compared = [index for index in compared if not own[index] or not kept >= set(own[index])]
    common = [[name for name in group.names if name in known] for group in theirs]
    _match_groups(common, [[name for name in own[index] if name not in kept] for index in compared])
    settings: list[Any] = list(own_groups)
    for index, group in zip(compared, theirs, strict=True):
        settings[index] = group.settings
    return settings


def _match_groups(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(own):
        raise _MisfitError(f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(own)}")
    for index, (theirs, mine) in enumerate(zip(saved, own, strict=True)):
        lacking, more = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
        if lacking or more:
            differs = listed("the checkpoint lacks", lacking) + listed("it also has", more)
            raise _MisfitError(f"parameter group {index} is another one than the checkpoint's: {differs[:-2]}")


def _match_arrays(
    optimizer: HostOptimizer,
    groups: list[Group],
    small: Mapping[str, Mapping[str, Any]],
    by_param: Mapping[int, StoredParam],
) -> None:
    """Parameters that have made steps have every array that the optimizer needs."""
    lacking = []
    for handle, (arrays, _) in needs_of_pieces(optimizer, groups).items():
        stored = by_param.get(id(handle.tensor))
        if stored is None or not (stored.keys or "step" in small.get(stored.name, {})):
            continue
        lacking += [f"{stored.name}.{key}" for key in arrays if key not in stored.arrays]
    if lacking:
        raise _MisfitError(f"the checkpoint has no state of this optimizer: {listed('it lacks', lacking)[:-2]}")
