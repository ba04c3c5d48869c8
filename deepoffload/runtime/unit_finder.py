"""Finds the units of a model without annotation: which parameters move together, and which modules open windows.

A unit is what one call uses: an element of a ``ModuleList`` or ``Sequential`` (a transformer layer), a module with
its own parameters and nothing repeated below it, or a leaf. What is larger than the budget can hold in a few
pieces is split along its children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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


class _Finder:
    def __init__(self, root_name: str, max_unit_bytes: int, nbytes: Callable[[Tensor], int]) -> None:
        self.root_name = root_name
        self.max_unit_bytes = max_unit_bytes
        self.nbytes = nbytes
        self.units: list[UnitPlan] = []
        self.windows: list[tuple[str, nn.Module]] = []
        self.outer: list[tuple[str, nn.Module]] = []
        self._taken: set[int] = set()
        self._inside: set[int] = set()

    def visit(self, module: nn.Module, name: str, *, repeated: bool) -> None:
        params = [(key, param) for key, param in module.named_parameters() if not is_lazy(param)]
        if not params and any(is_lazy(param) for param in module.parameters(recurse=False)):
            self.windows.append((name, module))  # its parameters are adopted when they have got their shapes
        if not params:
            return
        direct = any(param is not None for param in module._parameters.values())
        leaf = not any(next(child.parameters(), None) is not None for child in module.children())
        small = sum(self.nbytes(param) for _, param in params) <= self.max_unit_bytes
        has_containers = any(isinstance(child, _CONTAINERS) for child in module.modules() if child is not module)
        callable_module = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if callable_module and (leaf or (small and (repeated or (direct and not has_containers)))):
            self._add(name, module, params)
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


def find_units(root: nn.Module, max_unit_bytes: int, nbytes: Callable[[Tensor], int]) -> RootUnits:
    """The units of ``root`` in registration order; tied parameters belong to the first unit that has them.

    ``max_unit_bytes`` bounds the bytes of a unit where its module can be split; ``nbytes`` says what a parameter will
    take (in the dtype it will compute in).
    """
    finder = _Finder(type(root).__name__, max_unit_bytes, nbytes)
    finder.visit(root, "", repeated=False)
    return RootUnits(tuple(finder.units), tuple(finder.windows), tuple(finder.outer))
