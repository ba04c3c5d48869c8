"""Which modules may write to their weights where neither a version counter nor a class-swapped door would show it.

``self.weight.data.clamp_()`` inside a forward moves no version. Windows over such modules keep the doors: every
access is then seen. So do windows over modules that run parts of themselves behind activation checkpoints: these run
again in backward, without the window, and must save the same tensors then.

The code is asked, not run: a module counts when its methods, the hooks on it, or a function, class or method outside of
torch that these name (and so on; see ``params.code_reader``) name ``data``, ``numpy`` and the like. A program marks a
module with :func:`careful` when its code does not name what it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from deepoffload.errors import UsageError
from deepoffload.params.code_reader import is_of_the_program, reads_any
from deepoffload.params.torch_private import forward_hooks_of_all, forward_pre_hooks_of_all

M = TypeVar("M", bound=nn.Module)

_TELLING_NAMES = frozenset(
    "data grad zero_grad numpy data_ptr untyped_storage storage _typed_storage set_ __array__ asarray dlpack "
    "__dlpack__ to_dlpack from_dlpack _unsafe_preserve_version_counter all_reduce broadcast "
    "checkpoint checkpoint_sequential".split()
)
_CASTING_NAMES = frozenset({"autocast", "custom_fwd"})


class _Careful:
    """The forward pre-hook by which :func:`careful` marks a module. It does nothing in a call."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


def careful(module: M) -> M:
    """Say that the forward of ``module`` changes weights where deepoffload cannot see it.

    Two things come together in such a module. It writes through ``weight.data``, ``weight.numpy()`` or the like. And
    its code does not name the function that writes, which comes from a dictionary or a list, for example. All other
    modules are found without this call. Calls of ``module``, and of the modules in it, then check every access to a
    paged weight, which costs several microseconds each. The numbers of other modules do not change.

    Call it at any time, on a paged or on an ordinary module; a second call changes nothing. Modules that are added
    later need their own call.

    Returns:
        ``module``.

    Raises:
        UsageError: ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"careful() takes the module whose forward changes weights, not {type(module).__name__}; pass the layer"
        )
    for child in module.modules():
        mark_careful(child)
    return module


def mark_careful(module: nn.Module) -> None:
    """Let windows over ``module`` keep the doors. Those over modules in it do not change."""
    if not _is_marked(module):
        module.register_forward_pre_hook(_Careful())


def _is_marked(module: nn.Module) -> bool:
    return any(isinstance(hook, _Careful) for hook in module._forward_pre_hooks.values())


def may_bypass_hooks(module: nn.Module) -> bool:
    """True when what a call of ``module`` may run could change weights without a trace, or when the program says so
    (:func:`careful`)."""
    return any(map(_is_marked, module.modules())) or reads_any(_TELLING_NAMES, _run_by(module), _objects_of(module))


def may_cast(module: nn.Module) -> bool:
    """True when what a call of ``module`` may run could enter autocast."""
    return reads_any(_CASTING_NAMES, _run_by(module), _objects_of(module))


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """What changes when forward hooks, or another forward, are put on a module or below it."""
    ids: list[int] = [*forward_pre_hooks_of_all, *forward_hooks_of_all]
    for child in module.modules():
        ids += child._forward_pre_hooks
        ids += child._forward_hooks
        ids.append(id(child.__dict__.get("forward")))
    return tuple(ids)


def _run_by(module: nn.Module) -> Iterator[Any]:
    """The classes, hooks and callable attributes of all modules at and below ``module``."""
    yield from forward_pre_hooks_of_all.values()
    yield from forward_hooks_of_all.values()
    yield from {type(child) for child in module.modules()}
    for child in module.modules():
        yield from child._forward_pre_hooks.values()
        yield from child._forward_hooks.values()
        for value in child.__dict__.values():
            if callable(value) and not isinstance(value, nn.Module):
                yield value


def _objects_of(module: nn.Module) -> dict[str, list[Any]]:
    """What attributes of ``module`` and of all below hold and cannot be called; code may call a method of it."""
    found: dict[str, list[Any]] = {}
    for child in module.modules():
        for name, value in child.__dict__.items():
            if not callable(value) and is_of_the_program(type(value)):
                found.setdefault(name, []).append(value)
    return found
