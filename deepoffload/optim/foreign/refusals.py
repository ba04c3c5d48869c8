"""Which optimizers are not stepped one parameter at a time: those that mix parameters, or know more than these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.optim.foreign.maker import Maker, settings_of
from deepoffload.optim.foreign.state_form import begin_training, same_setting, untouched_random_numbers

_MIXING = ("LBFGS", "SparseAdam")
"""Classes of torch that are refused by name: one looks at all parameters, one takes sparse gradients alone."""

_CLASS_ITSELF = "use the class itself: it works on paged parameters, with its state in memory"

_EXTENT = 3
"""Of the dimensions of the tensors with which a class is tried."""

_SCALES = (1.0, 1e-4, 1e4)
"""Of the gradients of each trial step: a limit of a global norm is not met by those of any one size."""


def refuse_class(made_class: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedError`` for what is no class of optimizer, is known to mix parameters, or holds the model."""
    if not isinstance(made_class, type) or not issubclass(made_class, torch.optim.Optimizer):
        raise UnsupportedError(
            f"deepoffload.paged takes a class of optimizers, such as torch.optim.Adafactor, not {made_class!r}"
        )
    if any(known.__name__ in _MIXING and known.__module__.startswith("torch.") for known in made_class.__mro__):
        raise UnsupportedError(
            f"{made_class.__name__} does not look at one parameter at a time; use the class itself: it works on paged "
            "parameters, with its state in memory"
        )
    for key, value in arguments.items():
        if _holds_model(value):
            raise UnsupportedError(
                f"{made_class.__name__}({key}=...) is given a module or a parameter: its step could use weights other "
                "than the one that it updates, which may be away. Use the class itself"
            )
    for known in made_class.__mro__:
        for name, value in vars(known).items() if known.__module__ != torch.optim.Optimizer.__module__ else ():
            found = _closed_over(value, set()) if isinstance(value, FunctionType) else None
            if found is not None:
                raise UnsupportedError(
                    f"{made_class.__name__}.{name} uses {found!r}, a module or parameters of its surroundings. "
                    "deepoffload.paged calls step() for one parameter at a time, whose bytes are there while all "
                    "others may be away. Let it go through self.param_groups, and give it what else it needs as "
                    f"settings of groups; or {_CLASS_ITSELF}"
                )


def _refuse_own_list(maker: Maker) -> None:
    """Raise ``UnsupportedError`` for a class that has failed the trial and keeps its parameters in an attribute."""
    held = [name for name, value in maker.attributes.items() if name not in _OF_TORCH and _holds_model(value)]
    if held:
        raise UnsupportedError(
            f"{maker.name} keeps parameters in self.{held[0]}, and its step uses them. deepoffload.paged calls step() "
            "for one parameter at a time, which self.param_groups then has, whose bytes are there while all others may "
            f"be away. Go through self.param_groups instead of self.{held[0]}; or {_CLASS_ITSELF}"
        )


_OF_TORCH = ("param_groups", "state", "defaults")
"""Attributes of every optimizer that have parameters."""


def _holds_model(value: Any) -> bool:
    if isinstance(value, (nn.Module, nn.Parameter)):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_model, value.values()))
    return isinstance(value, (list, tuple, set)) and any(map(_holds_model, value))


def _closed_over(function: FunctionType, seen: set[int]) -> str | None:
    """The name by which a function uses a module or parameters that are not given to it."""
    seen.add(id(function))
    cells = dict(_cells(function))
    for name, value in (*cells.items(), *_named(function)):
        if _holds_model(value):
            return name
        if isinstance(value, FunctionType) and id(value) not in seen:
            # What a decorator wraps is in a cell. Of other functions only those that keep something are looked at.
            found = _closed_over(value, seen) if value.__closure__ or name in cells else None
            if found is not None:
                return found
    return None


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default of an argument", value
    for name in function.__code__.co_names:
        yield name, function.__globals__.get(name)


def refuse_mixing(maker: Maker, group: Mapping[str, Any]) -> None:
    """Try a class on small tensors with a group's settings, together and one by one.

    Raises:
        UnsupportedError: the values differ: a step needs all parameters, or draws random numbers.
    """
    shapes = _small_shapes(group["params"])
    if not shapes:
        return
    settings = settings_of(group)
    try:
        with untouched_random_numbers():
            same = _is_same(maker, shapes, settings)
    except UnsupportedError:
        raise
    except Exception as error:
        _refuse_own_list(maker)
        raise UnsupportedError(
            f"{maker.name}: a step over small tensors fails: {type(error).__name__}: {error}. deepoffload.paged calls "
            "step() without arguments, for one parameter at a time; use the class itself"
        ) from error
    if not same:
        _refuse_own_list(maker)
        raise UnsupportedError(
            f"{maker.name} gives other values where it steps parameters one by one: it uses a statistic of all, counts "
            "its own calls, or draws random numbers. Use the class itself: it works on paged parameters, with its "
            "state in memory"
        )


def _small_shapes(params: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Two tensors at least, and one for each number of dimensions."""
    dims = list(dict.fromkeys(param.dim() for param in islice(params, 64) if param.numel()))
    if not dims:
        return []
    return [tuple(_EXTENT + index + dim for index in range(count)) for dim, count in enumerate([*dims, dims[0]])]


def _is_same(maker: Maker, shapes: Sequence[tuple[int, ...]], settings: Mapping[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) * scale for shape in shapes] for scale in _SCALES]
    params = [nn.Parameter(value.clone()) for value in values]
    together = maker.together(params, settings)
    begin_training(together)
    for mine in grads:
        for param, grad in zip(params, mine, strict=True):
            param.grad = grad.clone()
        together.step()
    for index, (param, value) in enumerate(zip(params, values, strict=True)):
        alone = nn.Parameter(value.clone())
        state, now = _alone(maker, alone, settings, [mine[index] for mine in grads])
        if not torch.equal(alone, param) or not _same_values(state, together.state[param]):
            return False
        if not _same_values(now, {k: v for k, v in together.param_groups[0].items() if k != "params"}):
            return False
    return True


def _alone(
    maker: Maker, param: nn.Parameter, settings: Mapping[str, Any], grads: Sequence[Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and settings after steps over one parameter, each by a new object."""
    optimizer = maker.fresh(param, settings)
    begin_training(optimizer)
    for number, grad in enumerate(grads):
        if number:
            now = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            optimizer = maker.going_on(param, now, optimizer.state[param])
        param.grad = grad.clone()
        before = _counts(optimizer)
        optimizer.step()
        _refuse_more_state(maker, optimizer, param, before)
    now = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return optimizer.state[param], now


def _refuse_more_state(maker: Maker, optimizer: Any, param: Tensor, before: Mapping[str, Any]) -> None:
    """Raise where a step has kept something that belongs to no parameter: a later step may use it."""
    kept = [repr(key) for key in optimizer.state if key is not param]
    kept += [f"self.{key}" for key, value in _counts(optimizer).items() if not _same(value, before.get(key))]
    if kept:
        raise UnsupportedError(
            f"{maker.name} counts its own calls or keeps other state of all parameters together ({', '.join(kept)}); "
            "only state of one parameter, and settings of groups, can be paged. Use the class itself: it works on "
            "paged parameters, with its state in memory"
        )


def _counts(optimizer: Any) -> dict[str, Any]:
    """Numbers and tensors that the object itself has. Flags (a warning was given) say nothing."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in vars(optimizer).items()
        if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
    }


def _same_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Nested settings or state with the same values; of things that cannot be compared the type counts."""
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _same_values(one, other)
    return same_setting(one, other)
