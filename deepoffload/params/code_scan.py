"""Which modules may write to their weights where neither a version counter nor a class-swapped door would show it.

``self.weight.data.clamp_()`` inside a forward moves no version. Windows over such modules keep the doors: every
access is then seen. So do windows over modules that run parts of themselves behind activation checkpoints: these run
again in backward, without the window, and must save the same tensors then.

The code is asked, not run: a module counts when its methods, the hooks on it, or a function or class outside of torch
that these name (and so on) name ``data``, ``numpy`` and the like. A program marks a module with :func:`careful` when
its code does not name what it calls.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch import nn

from deepoffload.errors import UsageError
from deepoffload.params.torch_private import forward_hooks_of_all, forward_pre_hooks_of_all

M = TypeVar("M", bound=nn.Module)

_TELLING_NAMES = frozenset(
    "data grad zero_grad numpy data_ptr untyped_storage storage _typed_storage set_ __array__ asarray dlpack "
    "__dlpack__ to_dlpack from_dlpack _unsafe_preserve_version_counter all_reduce broadcast "
    "checkpoint checkpoint_sequential".split()
)
_CASTING_NAMES = frozenset({"autocast", "custom_fwd"})
_NOT_IN_FORWARD = ("__init__", "_init", "init_", "reset_parameters", "extra_repr", "_load_from_state_dict")
_LEFT_ALONE = frozenset({"torch", "deepoffload", "numpy", *sys.stdlib_module_names})
"""Top-level packages whose functions leave the values of weights alone unless their name tells."""

CODES_MAX = 1000
"""How much code is read for one module; what names more than that keeps the doors unread."""


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
        if not _is_marked(child):
            child.register_forward_pre_hook(_Careful())
    return module


def _is_marked(module: nn.Module) -> bool:
    return any(isinstance(hook, _Careful) for hook in module._forward_pre_hooks.values())


def may_bypass_hooks(module: nn.Module) -> bool:
    """True when what a call of ``module`` may run could change weights without a trace, or when the program says so
    (:func:`careful`)."""
    return any(map(_is_marked, module.modules())) or _Reader(_TELLING_NAMES).any_of(_run_by(module))


def may_cast(module: nn.Module) -> bool:
    """True when what a call of ``module`` may run could enter autocast."""
    return _Reader(_CASTING_NAMES).any_of(_run_by(module))


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


class _Reader:
    """Reads code once, following the names in it, and looks out for some."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._seen: set[int] = set()
        self._read = 0

    def any_of(self, things: Iterable[Any]) -> bool:
        """True when the code of one of them has one of the names, or is more than what is read."""
        return any(self._telling(thing) for thing in things)

    def _telling(self, thing: Any) -> bool:
        """The same of one (a function, a class, an object that can be called) and what it names."""
        todo = [thing]
        while todo:
            thing = _function_of(todo.pop())
            if thing is None or id(thing) in self._seen:
                continue
            self._seen.add(id(thing))
            if isinstance(thing, type):
                todo += _methods(thing)
                continue
            for code in _codes(thing.__code__):
                self._read += 1
                if self._read > CODES_MAX or self._tells(code):
                    return True
                todo += _named(thing, code)
        return False

    def _tells(self, code: CodeType) -> bool:
        texts = (constant for constant in code.co_consts if type(constant) is str)  # getattr(weight, "data")
        return not (self._names.isdisjoint(code.co_names) and self._names.isdisjoint(texts))


def _function_of(thing: Any) -> FunctionType | type | None:
    """The Python function behind something that can be called, or the class whose methods it runs; None for what is
    left alone."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, types.MethodType):
        thing = thing.__func__ if isinstance(thing.__self__, type) else type(thing.__self__)
    if isinstance(thing, (staticmethod, classmethod)):
        thing = thing.__func__
    if not isinstance(thing, (FunctionType, type)):
        thing = getattr(thing, "__wrapped__", type(thing))
    if not isinstance(thing, (FunctionType, type)):
        return None
    owner = getattr(thing, "__module__", None) or ""
    return None if owner.partition(".")[0] in _LEFT_ALONE else thing


def _methods(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LEFT_ALONE:
            continue  # torch's own layers leave weights alone in forward
        for name, method in vars(base).items():
            function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
            function = method.fget if isinstance(method, property) else function
            if isinstance(function, FunctionType) and not name.startswith(_NOT_IN_FORWARD):
                yield function


def _named(function: FunctionType, code: CodeType) -> Iterator[Callable[..., Any]]:
    """Functions and classes that ``code`` names: globals, attributes of modules among them, and its closure."""
    space = function.__globals__
    modules = []
    for name in code.co_names:
        value = space.get(name)
        if isinstance(value, (FunctionType, type, functools.partial)):
            yield value
        elif isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _LEFT_ALONE:
            modules.append(value)
    for module in modules:
        for name in code.co_names:
            value = vars(module).get(name)
            if isinstance(value, (FunctionType, type, functools.partial)):
                yield value
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if callable(value) and not isinstance(value, nn.Module):
            yield value


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
