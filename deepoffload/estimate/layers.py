"""Layers that are alike in a model's lists of modules, and how few of them tell what all of them do.

A layer does what it does because of its sort and of its neighbours: what it takes over from one and leaves to the
other. So a layer between others of certain sorts stands for every layer of its sort between such others. Mostly the two
next to it are enough (``radius`` 1).

Layers may share parameters, or what the model computes once for all of them. In backward the last one makes the
gradient, the one before it makes a sum of that and its own, others add to the sum, and at the first one it is complete.
So layers that share are of four sorts (``Role``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum

from torch import nn

TIMES = 2
"""So often every layer between its neighbours is run, to see that it does the same again."""

Context = tuple[int | None, ...]
"""The sorts of a layer and of its neighbours, in their order; None beyond the ends."""

_OWN_NUMBER = ("idx", "index", "layer_id", "number")
"""In the names of attributes that say which layer it is, and not of what sort."""


class Role(Enum):
    """Which of the layers that share a parameter one is, in their order."""

    FIRST = 0
    BETWEEN = 1
    LAST_BUT_ONE = 2
    LAST = 3


@dataclass(frozen=True)
class Stack:
    """The layers of ``container`` in their order.

    layers: of each the modules (those behind it that have no parameters among them). sorts: of each, as a number.
    kinds: the same but for the roles of layers that share parameters.
    """

    container: nn.Module
    layers: tuple[tuple[nn.Module, ...], ...]
    sorts: tuple[int, ...]
    kinds: tuple[int, ...]

    def contexts(self, radius: int) -> list[Context]:
        around: list[int | None] = [*[None] * radius, *self.sorts, *[None] * radius]
        return [tuple(around[at : at + 2 * radius + 1]) for at in range(len(self.sorts))]

    def few(self, times: int, radius: int) -> tuple[int, ...]:
        """The numbers of few layers, in which every context comes ``times`` times, or as often as it is there.

        They are the first ones and the last ones: the last ``radius``, or more where a layer near the end is like no
        other. The last ones are of the kinds that layers at their new places were: a model may ask by its number of
        what kind a layer is.
        """
        total, contexts = len(self.sorts), self.contexts(radius)
        wanted = Counter({context: min(times, count) for context, count in Counter(contexts).items()})
        for last in range(radius, total - radius if wanted.total() < total else 0):
            rest = total - last
            missing = wanted - Counter(contexts[rest:])
            for first, context in enumerate(contexts[: rest - 1], 1):
                missing.subtract((context,))
                if max(missing.values(), default=0) <= 0 and self._join(first, rest, radius):
                    return *range(first), *range(rest, total)
        return tuple(range(total))

    def _join(self, first: int, rest: int, radius: int) -> bool:
        """Whether layers from ``rest`` on may come behind the first ones: each has the neighbours that it had."""
        sorts, kinds = self.sorts, self.kinds
        return (
            first >= radius
            and sorts[first - radius : first + radius] == sorts[rest - radius : rest + radius]
            and kinds[first : first + len(kinds) - rest] == kinds[rest:]
        )


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
    kinds = _numbered(tuple(map(_sort, layer)) for layer in layers)
    return Stack(container, tuple(map(tuple, layers)), _numbered(zip(kinds, _roles(layers), strict=True)), kinds)


def _numbered(values: Iterable[object]) -> tuple[int, ...]:
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def _roles(layers: Sequence[Sequence[nn.Module]]) -> list[tuple[object, ...]]:
    """Of each layer and each of its parameters: which layers share it, and which of them this one is. None: its own."""
    users = _users(layers)

    def role(number: int, param: nn.Parameter) -> object:
        sharing = users[id(param)]
        if len(sharing) == 1:
            return None
        roles = {sharing[0]: Role.FIRST, sharing[-2]: Role.LAST_BUT_ONE, sharing[-1]: Role.LAST}
        return tuple(sharing), roles.get(number, Role.BETWEEN)

    return [tuple(role(number, param) for param in _params(layer)) for number, layer in enumerate(layers)]


def _users(layers: Sequence[Sequence[nn.Module]]) -> dict[int, list[int]]:
    """``id(parameter)`` to the layers that have it."""
    users: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        for param in _params(layer):
            users.setdefault(id(param), []).append(number)
    return users


def _params(layer: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [param for module in layer for param in module.parameters()]


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
    """Which units lie in which layers.

    layer_of: of a unit that one layer uses, the stack and the layer. users: of a unit that several layers of a stack
    share, the stack and these layers. units: by stack and layer, the unit of each of its parameters (-1: of none).
    """

    layer_of: Mapping[int, tuple[int, int]]
    users: Mapping[int, tuple[int, tuple[int, ...]]]
    units: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of(cls, stacks: Sequence[Stack], unit_of: Mapping[int, int], model: nn.Module) -> Places | None:
        """None where a unit has parameters of several layers, but for those that they share, or of a layer and of
        none."""
        layers_of: dict[int, dict[tuple[int, int], bool]] = {}  # True: with parameters that no other layer has
        units = []
        inside: set[int] = set()
        for at, stack in enumerate(stacks):
            mine = []
            firsts: dict[int, tuple[int, ...]] = {}
            users = _users(stack.layers)
            for number, layer in enumerate(stack.layers):
                params = _params(layer)
                inside.update(map(id, params))
                mine.append(tuple(unit_of.get(id(param), -1) for param in params))
                for param, unit in zip(params, mine[-1], strict=True):
                    if unit >= 0:
                        of_unit = layers_of.setdefault(unit, {})
                        of_unit[at, number] = of_unit.get((at, number), False) or len(users[id(param)]) == 1
                like = firsts.setdefault(stack.sorts[number], mine[-1])
                pairs = set(zip(like, mine[-1], strict=True))
                if len(pairs) != len(set(like)) or len(pairs) != len(set(mine[-1])):
                    return None
            units.append(tuple(mine))
        if any(unit_of.get(id(param)) in layers_of for param in model.parameters() if id(param) not in inside):
            return None
        several = {unit: found for unit, found in layers_of.items() if len(found) > 1}
        if any(sum(found.values()) > 1 or len({at for at, _ in found}) > 1 for found in several.values()):
            return None
        return cls(
            layer_of={unit: next(iter(found)) for unit, found in layers_of.items() if unit not in several},
            users={unit: (next(iter(found))[0], tuple(n for _, n in found)) for unit, found in several.items()},
            units=tuple(units),
        )

    def place(self, units: Sequence[int]) -> tuple[int, int] | None:
        """The stack and the layer that ``units`` lie in, but for those that layers share."""
        found = {self.layer_of.get(unit) for unit in units if unit not in self.users}
        return found.pop() if len(found) == 1 else None

    def sharing(self, units: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """The stack and its layers that share ``units``; None where not all of these are shared by the same."""
        found = {self.users.get(unit) for unit in units}
        return found.pop() if len(found) == 1 else None

    def users_of(self, stack: int, layer: int, other: int) -> tuple[int, ...]:
        """The layers of ``stack`` that share a unit which these two share; none where these share none."""
        shared = (layers for at, layers in self.users.values() if at == stack and layer in layers and other in layers)
        return next(shared, ())

    def like(self, stack: int, layer: int, other: int) -> dict[int, int]:
        """The units of ``layer`` to those of another one of its sort."""
        return dict(zip(self.units[stack][layer], self.units[stack][other], strict=True))
