"""Finds the units of a model without annotation: which parameters move together, and which modules open windows.

A unit is what one call uses: an element of a ``ModuleList`` or ``Sequential`` (a transformer layer), a module with
its own parameters and nothing repeated below it, or a leaf. What is larger than the budget can hold in a few
pieces is split along its children.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Apart = Callable[[nn.Module], bool]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that will form a unit, and the module whose calls open its window (None: only the door knows it)."""

    name: str
    module: nn.Module | None
    params: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True)
class RootUnits:
    """The units of one root module, and the modules to put windows on.

    ``outer``: modules that were split and are no window: the root, and those with their own parameters.
    """

    units: tuple[UnitPlan, ...]
    windows: tuple[tuple[str, nn.Module], ...]
    outer: tuple[tuple[str, nn.Module], ...]


@dataclass(frozen=True)
class _Facts:
    """What does not depend on the limit: a module's parameters, their bytes, and what sort of module it is."""

    params: Sequence[tuple[str, Tensor]]
    nbytes: int
    direct: bool
    leaf: bool
    has_containers: bool
    has_apart: bool

    @classmethod
    def of(cls, module: nn.Module, nbytes: Callable[[Tensor], int], apart: Apart | None) -> _Facts:
        params = [(key, param) for key, param in module.named_parameters() if not is_lazy(param)]
        return cls(
            params,
            sum(nbytes(param) for _, param in params),
            any(param is not None for param in module._parameters.values()),
            not any(next(child.parameters(), None) is not None for child in module.children()),
            any(isinstance(child, _CONTAINERS) for child in module.modules() if child is not module),
            apart is not None and any(apart(child) for child in module.modules() if child is not module),
        )


class _Visit:
    """One walk through the modules, for one limit."""

    def __init__(self, root_name: str, max_unit_bytes: int, facts: Callable[[nn.Module], _Facts]) -> None:
        self.root_name = root_name
        self.max_unit_bytes = max_unit_bytes
        self.facts = facts
        self.units: list[UnitPlan] = []
        self.windows: list[tuple[str, nn.Module]] = []
        self.outer: list[tuple[str, nn.Module]] = []
        self._taken: set[int] = set()
        self._inside: set[int] = set()

    def visit(self, module: nn.Module, name: str, *, repeated: bool) -> None:
        facts = self.facts(module)
        if not facts.params and any(is_lazy(param) for param in module.parameters(recurse=False)):
            self.windows.append((name, module))  # its parameters are adopted when they have got their shapes
        if not facts.params:
            return
        direct, small = facts.direct, facts.nbytes <= self.max_unit_bytes
        small = small and not facts.has_apart
        callable_module = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if callable_module and (facts.leaf or (small and (repeated or (direct and not facts.has_containers)))):
            self._add(name, module, facts.params)
            return
        if direct:
            own = [(key, param) for key, param in module.named_parameters(recurse=False) if not is_lazy(param)]
            self._add(name, None, own)
        if callable_module and (direct or not name):
            self.outer.append((name, module))
        self._inside.add(id(module))
        for key, child in module.named_children():
            if id(child) not in self._inside:  # a module may be registered below itself
                self.visit(child, f"{name}.{key}" if name else key, repeated=isinstance(module, _CONTAINERS))
        self._inside.remove(id(module))

    def _add(self, name: str, module: nn.Module | None, params: Iterable[tuple[str, Tensor]]) -> None:
        fresh = []
        for key, param in params:
            if id(param) not in self._taken:
                self._taken.add(id(param))
                fresh.append((f"{name}.{key}" if name else key, param))
        if module is not None:
            self.windows.append((name, module))
        if fresh:
            self.units.append(UnitPlan(name or self.root_name, module, tuple(fresh)))


class UnitFinder:
    """The units of one model for any limit. The modules are looked at once, and two limits share one answer if no
    module's size lies between them. The model stays as it is meanwhile.

    Args:
        nbytes: what a parameter will take (in the dtype it will compute in).
        apart: which modules are separate units, also where they are small, because they are read in parts.

    Attributes:
        num_walks: how often the modules were walked through.
    """

    def __init__(self, root: nn.Module, nbytes: Callable[[Tensor], int], apart: Apart | None = None) -> None:
        self._root = root
        self._nbytes = nbytes
        self._apart = apart
        self._facts: dict[int, _Facts] = {}
        self._found: dict[int, RootUnits] = {}
        self.num_walks = 0
        self._found[0] = self._walk(-1)  # this one visits every module that any other one visits
        self._steps = sorted({facts.nbytes for facts in self._facts.values() if facts.params})

    def step(self, max_unit_bytes: int) -> int:
        """A number that limits with the same answer share."""
        return bisect_right(self._steps, max_unit_bytes)

    def find(self, max_unit_bytes: int) -> RootUnits:
        """As :func:`find_units`."""
        step = self.step(max_unit_bytes)
        if step not in self._found:
            self._found[step] = self._walk(max_unit_bytes)
        return self._found[step]

    def _walk(self, max_unit_bytes: int) -> RootUnits:
        self.num_walks += 1
        return _walk(self._root, max_unit_bytes, self._facts_of)

    def _facts_of(self, module: nn.Module) -> _Facts:
        if id(module) not in self._facts:
            self._facts[id(module)] = _Facts.of(module, self._nbytes, self._apart)
        return self._facts[id(module)]


def find_units(root: nn.Module, max_unit_bytes: int, nbytes: Callable[[Tensor], int]) -> RootUnits:
    """The units of ``root`` in registration order; tied parameters belong to the first unit that has them.

    ``max_unit_bytes`` bounds the bytes of a unit where its module can be split; ``nbytes`` says what a parameter will
    take (in the dtype it will compute in).
    """
    return _walk(root, max_unit_bytes, lambda module: _Facts.of(module, nbytes, None))


def _walk(root: nn.Module, max_unit_bytes: int, facts: Callable[[nn.Module], _Facts]) -> RootUnits:
    walk = _Visit(type(root).__name__, max_unit_bytes, facts)
    walk.visit(root, "", repeated=False)
    return RootUnits(tuple(walk.units), tuple(walk.windows), tuple(walk.outer))
