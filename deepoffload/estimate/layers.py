"""Layers that are alike in a model's lists of modules, and how few of them tell what all of them do.

A layer does what it does because of its sort and of its neighbours: what it takes over from one and leaves to the
other. So a layer between others of certain sorts stands for every layer of its sort between such others. Mostly the two
next to it are enough (``radius`` 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

TIMES = 2
"""So often every layer between its neighbours is run, to see that it does the same again."""

Context = tuple[int | None, ...]
"""The sorts of a layer and of its neighbours, in their order; None beyond the ends."""

_OWN_NUMBER = ("idx", "index", "layer_id", "number")
"""In the names of attributes that say which layer it is, and not of what sort."""


@dataclass(frozen=True)
class Stack:
    """The layers of ``container`` in their order: of each the modules (those behind it that have no parameters among
    them) and the sort, as a number."""

    container: nn.Module
    layers: tuple[tuple[nn.Module, ...], ...]
    sorts: tuple[int, ...]

    def contexts(self, radius: int) -> list[Context]:
        around: list[int | None] = [*[None] * radius, *self.sorts, *[None] * radius]
        return [tuple(around[at : at + 2 * radius + 1]) for at in range(len(self.sorts))]

    def few(self, times: int, radius: int) -> tuple[int, ...]:
        """The numbers of few layers, in which every context comes ``times`` times, or as often as it is there.

        They are the first ones and the last ``radius``, which have the sorts that layers there had: a model may ask by
        its number of what sort a layer is.
        """
        contexts, sorts = self.contexts(radius), self.sorts
        missing = {context: min(times, count) for context, count in Counter(contexts[: len(sorts) - radius]).items()}
        unseen = set(missing)
        for first in range(len(sorts) - radius):
            context = contexts[first]
            missing[context] = missing.get(context, 0) - 1
            if missing[context] <= 0:
                unseen.discard(context)
            end = first + 1 + radius
            if not unseen and sorts[end - 2 * radius : end] == sorts[-2 * radius :] and end >= 2 * radius:
                return *range(first + 1), *range(len(sorts) - radius, len(sorts))
        return tuple(range(len(sorts)))


def find_stacks(model: nn.Module) -> list[Stack]:
    """The outermost lists of modules of which some layers can be left out."""
    found: list[Stack] = []

    def look(module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            stack = _stack(module)
            if stack is not None and len(stack.few(TIMES, radius=1)) < len(stack.layers):
                found.append(stack)
                return
        for child in module.children():
            look(child)

    look(model)
    return found


def _stack(container: nn.Module) -> Stack | None:
    layers: list[list[nn.Module]] = []
    for child in container._modules.values():
        if child is None:
            return None
        if next(child.parameters(), None) is not None:
            layers.append([child])
        elif layers:
            layers[-1].append(child)
    numbers: dict[object, int] = {}
    sorts = tuple(numbers.setdefault(tuple(map(_sort, layer)), len(numbers)) for layer in layers)
    return Stack(container, tuple(map(tuple, layers)), sorts)


def _sort(module: nn.Module | None) -> object:
    """What two modules have in common that do the same with other values."""
    if module is None:
        return None
    said = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not any(part in name for part in _OWN_NUMBER)
    )
    tensors = [
        (name, tensor if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [(name, _sort(child)) for name, child in module._modules.items()]
    return type(module), tuple(said), tuple(tensors), tuple(children)


@contextmanager
def shortened(stacks: Sequence[Stack], kept: Sequence[Sequence[int]]) -> Iterator[None]:
    """Take all layers but the ``kept`` ones out of their lists for a while."""
    with ExitStack() as undo:
        for stack, numbers in zip(stacks, kept, strict=True):
            every = stack.container._modules
            gone = {id(module) for layer in stack.layers for module in layer}
            gone -= {id(module) for number in numbers for module in stack.layers[number]}
            undo.callback(setattr, stack.container, "_modules", every)
            stays = [child for child in every.values() if id(child) not in gone]
            stack.container._modules = {str(number): child for number, child in enumerate(stays)}
        yield


@dataclass(frozen=True)
class Places:
    """``layer_of``: the stack and the layer that a unit lies in. ``units``: by stack and layer, the unit of each of
    its parameters (-1: of none)."""

    layer_of: Mapping[int, tuple[int, int]]
    units: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, stacks: Sequence[Stack], unit_of: Mapping[int, int], model: nn.Module) -> Places | None:
        """None where a unit has parameters of several layers, or of a layer and of none."""
        layer_of: dict[int, tuple[int, int]] = {}
        units = []
        inside: set[int] = set()
        for at, stack in enumerate(stacks):
            mine = []
            firsts: dict[int, tuple[int, ...]] = {}
            for number, layer in enumerate(stack.layers):
                params = [param for module in layer for param in module.parameters()]
                inside.update(map(id, params))
                mine.append(tuple(unit_of.get(id(param), -1) for param in params))
                if any(layer_of.setdefault(unit, (at, number)) != (at, number) for unit in mine[-1] if unit >= 0):
                    return None
                like = firsts.setdefault(stack.sorts[number], mine[-1])
                pairs = set(zip(like, mine[-1], strict=True))
                if len(pairs) != len(set(like)) or len(pairs) != len(set(mine[-1])):
                    return None
            units.append(tuple(mine))
        if any(unit_of.get(id(param)) in layer_of for param in model.parameters() if id(param) not in inside):
            return None
        return cls(layer_of, tuple(units))

    def place(self, units: Sequence[int]) -> tuple[int, int] | None:
        """The stack and the layer that all of ``units`` lie in."""
        found = {self.layer_of.get(unit) for unit in units}
        return found.pop() if len(found) == 1 else None

    def like(self, stack: int, layer: int, other: int) -> dict[int, int]:
        """The units of ``layer`` to those of another one of its sort."""
        return dict(zip(self.units[stack][layer], self.units[stack][other], strict=True))
