"""What state a class of optimizer makes for a parameter, found out before the first step.

The class makes two steps over a tensor of the parameter's shape on the meta device, which costs no memory. Where its
step looks at values, over zeros of that shape. So pieces can be laid out before the first step changes anything, and
state that cannot be kept is refused before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.optim.foreign.maker import Maker
from deepoffload.params.torch_private import outside_user_modes

SMALL_BYTES = 4 << 10
"""State of other shapes than the parameter's may take so much memory, or ..."""

SMALL_SHARE = 8
"""... this part of the parameter's fp32 bytes."""

_IN_MEMORY = (bool, int, float, complex, str, type(None), torch.dtype)
_KERNELS = ("fused", "foreach", "capturable")
"""Settings that choose how a step is computed, not what it keeps. The meta device knows none of these ways."""


@dataclass(frozen=True)
class StateForm:
    """What there is after each step.

    Attributes:
        arrays: keys of fp32 tensors with the parameter's shape. They go into pieces.
        others: the rest, by key: numbers, and small tensors of other shapes. It stays in memory.
        changing: settings of the group that a step changes.
    """

    arrays: tuple[str, ...]
    others: tuple[str, ...]
    changing: tuple[str, ...]


def form_after(state: Mapping[str, Any], shape: torch.Size, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which entries of a parameter's state go into pieces, and which stay in memory.

    Raises:
        UnsupportedError: an entry can be kept in neither.
    """
    arrays, others, other_bytes = [], [], 0
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.dim() and value.shape == shape and value.dtype is torch.float32:
                arrays.append(key)
                continue
            other_bytes += value.nbytes
        elif not isinstance(value, _IN_MEMORY):
            raise UnsupportedError(
                f"{where} keeps a {type(value).__name__} as {key!r} in its state; tensors and numbers can be paged. "
                "Use the class itself: it works on paged parameters, with its state in memory"
            )
        others.append(key)
    if other_bytes > max(SMALL_BYTES, shape.numel() * 4 // SMALL_SHARE):
        raise UnsupportedError(
            f"{where} keeps {other_bytes} bytes of state that is not fp32 of the parameter's shape "
            f"({', '.join(map(repr, others))}); only as much as a {SMALL_SHARE}th of the parameter stays in memory. "
            "Use the class itself: it works on paged parameters, with all its state in memory"
        )
    return tuple(arrays), tuple(others)


def find_form(maker: Maker, shape: torch.Size, settings: Mapping[str, Any], name: str) -> StateForm:
    """What a class will keep for a parameter of this shape. Changes nothing.

    Args:
        name: of the parameter, for messages.

    Raises:
        UnsupportedError: state that cannot be kept, or that is not the same after two steps as after one.
    """
    where, failed = f"{maker.name} over {name}", None
    for device, changes in (("meta", _plain_kernels(settings)), ("cpu", {})):
        try:
            return _two_steps(maker, shape, {**settings, **changes}, where, device)
        except UnsupportedError:
            raise
        except Exception as error:  # a class of somebody else may raise anything for tensors without values
            failed = error
    raise UnsupportedError(
        f"{where}: its step fails on a tensor of shape {tuple(shape)}: {type(failed).__name__}: {failed}"
    ) from failed


def _plain_kernels(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: False for key in _KERNELS if settings.get(key)}


def _two_steps(maker: Maker, shape: torch.Size, settings: Mapping[str, Any], where: str, device: str) -> StateForm:
    with untouched_random_numbers():
        param = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        param.grad = torch.full(shape, 1e-3, dtype=torch.float32, device=device)
        optimizer = maker.fresh(param, settings)
        begin_training(optimizer)
        before = _settings(optimizer)
        optimizer.step()
        first = form_after(optimizer.state[param], shape, where)
        after = _settings(optimizer)
        optimizer.step()
        if form_after(optimizer.state[param], shape, where) != first:
            raise UnsupportedError(
                f"{where}: its state has other entries or shapes after the second step than after the first; state "
                "that is paged stays as the first step makes it"
            )
    changing = tuple(key for key, value in after.items() if key not in before or not same_setting(before[key], value))
    return StateForm(*first, changing)


def begin_training(optimizer: Any) -> None:
    """Schedule-free optimizers have to be told."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def same_setting(one: Any, other: Any) -> bool:
    """Whether two settings are equal; tensors by their values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or (both and one.shape == other.shape and bool((one == other).all()))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two groups have equal settings."""
    return one.keys() == other.keys() and all(same_setting(value, other[key]) for key, value in one.items())


@contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """What runs inside draws no number of the program's, and is in none of its modes."""
    with torch.random.fork_rng(devices=[]), plain_surroundings():
        yield


@contextmanager
def plain_surroundings(device: str = "cpu") -> Iterator[None]:
    """Outside the modes of the program: a step that is made late may run in the middle of its forward."""
    with outside_user_modes(), torch.autocast(device, enabled=False):
        yield
