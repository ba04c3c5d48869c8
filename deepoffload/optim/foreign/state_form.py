"""What state a class of optimizer makes for a parameter, found out before the first step.

The class makes two steps over a tensor of the parameter's shape on the meta device, which costs no memory. Where its
step looks at values, over zeros of that shape. So pieces can be laid out before the first step changes anything, and
state that cannot be kept is refused before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.packed import Packed, Path, lay_out, outline, packed_keys, tensors_in
from deepoffload.params.torch_private import outside_user_modes

SMALL_BYTES = 4 << 10
"""State of other shapes than the parameter's stays in memory up to so many bytes, or ..."""

SMALL_SHARE = 8
"""... this part of the parameter's fp32 bytes. What is more goes into pieces, and so do tensors in lists."""

_IN_MEMORY = (bool, int, float, complex, str, type(None), torch.dtype)
_KERNELS = ("fused", "foreach", "capturable")
"""Settings that choose how a step is computed, not what it keeps. The meta device knows none of these ways."""


@dataclass(frozen=True)
class StateForm:
    """What there is after each step.

    Attributes:
        arrays: keys of fp32 tensors with the parameter's shape. They go into pieces.
        others: the rest, by key. It stays in memory, but for what is packed.
        packed: tensors of the rest that go into pieces as bytes (:mod:`~deepoffload.optim.foreign.packed`).
        outlines: of lists and tuples, by key.
        changing: settings of the group that a step changes.
    """

    arrays: tuple[str, ...]
    others: tuple[str, ...]
    packed: tuple[Packed, ...] = ()
    outlines: tuple[tuple[str, Any], ...] = ()
    changing: tuple[str, ...] = ()

    def has_same_state(self, other: StateForm) -> bool:
        """Whether the state is the same, in any order."""
        return (
            set(self.arrays) == set(other.arrays)
            and set(self.others) == set(other.others)
            and self.packed == other.packed
            and dict(self.outlines) == dict(other.outlines)
        )

    def fields(self, numel: int) -> tuple[str, ...]:
        """All arrays that pieces have for a parameter of so many elements."""
        return (*self.arrays, *packed_keys(self.packed, numel))


def form_after(state: Mapping[str, Any], shape: torch.Size, where: str) -> StateForm:
    """Which entries of a parameter's state go into pieces, and which stay in memory.

    Raises:
        UnsupportedError: an entry can be kept in neither.
    """
    arrays, others, outlines = [], [], []
    loose: dict[Path, Tensor] = {}
    listed: dict[Path, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.dim() and value.shape == shape and value.dtype is torch.float32:
                arrays.append(key)
                continue
        _check_kinds(key, value, where)
        if isinstance(value, Tensor):
            loose[key,] = value
        elif isinstance(value, (list, tuple)):
            listed.update(tensors_in(key, value))
            outlines.append((key, outline(value)))
        others.append(key)
    if sum(value.nbytes for value in loose.values()) > max(SMALL_BYTES, shape.numel() * 4 // SMALL_SHARE):
        listed |= {path: value for path, value in loose.items() if value.dim()}
    return StateForm(tuple(arrays), tuple(others), lay_out(listed), tuple(outlines))


def _check_kinds(key: str, value: Any, where: str) -> None:
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_kinds(key, each, where)
    elif isinstance(value, Tensor):
        if value.layout is not torch.strided or type(value) not in (Tensor, nn.Parameter):
            raise UnsupportedError(
                f"{where} keeps a {type(value).__name__} ({value.layout}) as {key!r} in its state; ordinary tensors "
                "can be paged. Use the class itself: it works on paged parameters, with its state in memory"
            )
    elif not isinstance(value, _IN_MEMORY):
        raise UnsupportedError(
            f"{where} keeps a {type(value).__name__} as {key!r} in its state; tensors, numbers and lists of them can "
            "be paged. Use the class itself: it works on paged parameters, with its state in memory"
        )


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
        second = form_after(optimizer.state[param], shape, where)
        if not second.has_same_state(first):
            raise UnsupportedError(
                f"{where}: its state has other entries or shapes after the second step than after the first "
                f"({described(second)}, and before {described(first)}); state that is paged stays as the first step "
                "makes it. Use the class itself: it works on paged parameters, with its state in memory"
            )
    changing = tuple(key for key, value in after.items() if key not in before or not same_setting(before[key], value))
    return replace(first, changing=changing)


def described(form: StateForm) -> str:
    """For errors: the keys, and the shapes of what has not the parameter's."""
    shapes: dict[str, list[str]] = {}
    for each in form.packed:
        shapes.setdefault(str(each.path[0]), []).append("x".join(map(str, each.shape)))
    keys = sorted((*form.arrays, *form.others))
    return ", ".join(f"{key} ({', '.join(shapes[key])})" if key in shapes else key for key in keys)


def begin_training(optimizer: Any) -> None:
    """Schedule-free optimizers have to be told."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def same_setting(one: Any, other: Any) -> bool:
    """Whether two settings are equal; tensors by their values."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool((one == other).all())
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
    casts = torch.is_autocast_enabled(device)
    with outside_user_modes(), torch.autocast(device, enabled=False) if casts else nullcontext():
        yield
