"""Which names the code of a program uses, as far as that code names what it runs.

Byte code has the names of globals and attributes that it looks up. So from one function the next ones can be found, and
nothing runs meanwhile::

    def forward(self, x):                 # names: clamp, self.limits, apply, weight
        clamp(self.weight)                # a global: its code is read, too
        self.limits.apply(self.weight)    # an object of the module: the method of its class is read
        EDITS["clamp"](self.weight)       # named by a text in a dictionary: not found
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

CODES_MAX = 1000
"""How much code is read for one module; what names more than that counts as using the names."""

_NOT_IN_FORWARD = ("__init__", "_init", "init_", "reset_parameters", "extra_repr", "_load_from_state_dict")
_LEFT_ALONE = frozenset({"torch", "deepoffload", "numpy", *sys.stdlib_module_names})
"""Top-level packages whose functions leave the values of weights alone unless their name tells."""

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]

Objects = Mapping[str, list[Any]]


def reads_any(names: frozenset[str], things: Iterable[Any], objects: Objects) -> bool:
    """True when the code of one of ``things`` (functions, classes, objects that can be called), or of what these name,
    has one of ``names``; and when there is more of it than is read.

    Args:
        objects: what attributes of the modules hold, by their names: code that names one and a method of it runs that.
    """
    reader = _Reader(names, objects)
    return any(reader.telling(thing) for thing in things)


def is_of_the_program(kind: type) -> bool:
    """Whether a class is the program's own, and of neither modules, tensors nor Python's modules."""
    owner = getattr(kind, "__module__", None)
    named = isinstance(owner, str) and owner.partition(".")[0] not in _LEFT_ALONE
    return named and not issubclass(kind, (nn.Module, Tensor, ModuleType, type))


class _Reader:
    """Reads code once, following the names in it, and looks out for some."""

    def __init__(self, names: frozenset[str], objects: Objects) -> None:
        self._names = names
        self._objects = objects
        self._seen: set[int] = set()
        self._read = 0

    def telling(self, thing: Any) -> bool:
        """True when the code of one thing, or of what it names, has one of the names, or is more than what is read."""
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
                imported = _imported(thing, code)
                if imported is None:
                    return True
                for value in _values(thing, code, imported, self._objects):
                    todo += _run_by(value, code)
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


def _methods(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LEFT_ALONE:
            continue  # torch's own layers leave weights alone in forward
        for name, value in vars(base).items():
            if not name.startswith(_NOT_IN_FORWARD):
                yield from _of_attribute(value)


def _of_attribute(value: Any) -> Iterator[Any]:
    """What an attribute of a class runs when it is looked up in an instance, or called."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        value = value.func
    if isinstance(value, FunctionType) or "__wrapped__" in getattr(value, "__dict__", ()):
        yield value
    elif hasattr(type(value), "__get__") and is_of_the_program(type(value)):
        yield from (type(value), *_callables(value))


def _callables(instance: Any) -> Iterator[Any]:
    """What an object keeps that can be called."""
    for value in getattr(instance, "__dict__", {}).values():
        if callable(value) and not isinstance(value, (type, nn.Module)):
            yield value


def _values(function: FunctionType, code: CodeType, imported: list[ModuleType], objects: Objects) -> Iterator[Any]:
    """What ``code`` names: globals, attributes of Python's modules among them and of those that it imports, what
    modules hold, and its closure."""
    spaces: list[Mapping[str, Any]] = [function.__globals__, *map(vars, imported)]
    for space in spaces:  # grows meanwhile
        for name in code.co_names:
            value = space.get(name)
            if value is None:
                continue
            if not isinstance(value, ModuleType):
                yield value
            elif not _is_left_alone(value) and not any(vars(value) is other for other in spaces):
                spaces.append(vars(value))
    for name in objects.keys() & code.co_names:
        yield from objects[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _run_by(value: Any, code: CodeType) -> Iterator[Callable[..., Any]]:
    """What code that names ``value`` runs of it."""
    if isinstance(value, (FunctionType, type, functools.partial, types.MethodType)):
        yield value
        return
    kind = type(value)
    if "__wrapped__" in getattr(value, "__dict__", ()):
        yield value
    elif is_of_the_program(kind):
        names = ("__call__", *code.co_names)
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] not in _LEFT_ALONE:
                for name in names:
                    yield from _of_attribute(vars(base).get(name))
        yield from _callables(value)


def _is_left_alone(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in _LEFT_ALONE


def _imported(function: FunctionType, code: CodeType) -> list[ModuleType] | None:
    """The modules that ``code`` imports when it runs; None when one of them is there and not loaded yet, so that it
    cannot be read."""
    found: list[ModuleType] = []
    if _IMPORT_NAME not in code.co_code[::2]:
        return found
    arguments: list[Any] = []  # an import takes the two before it: how many packages up, and the names that it takes
    for instruction in dis.get_instructions(code):
        if instruction.opcode == _IMPORT_NAME:
            name, (level, taken) = instruction.argval, arguments[-2:]
            if level:
                package = function.__globals__.get("__package__") or ""
                name = importlib.util.resolve_name("." * level + name, package) if package else name
            top, module = name.partition(".")[0], sys.modules.get(name)
            if top and top not in _LEFT_ALONE and (top in sys.modules or importlib.util.find_spec(top) is not None):
                if module is None or any(one != "*" and one not in vars(module) for one in taken or ()):
                    return None
                found += [module, sys.modules.get(top, module)]
        if instruction.opcode != dis.EXTENDED_ARG:
            arguments.append(instruction.argval)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
