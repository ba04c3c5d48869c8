"""Layers above the budget, which wait to be split while a model is built.

A weight that is larger than the budget cannot be paged. ``tile_linear`` can split that of an ``nn.Linear``, but only
when the layer is there with its values. Until then the weight stays what it is, an ordinary tensor. Those that nobody
has split when the context ends are refused then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from deepoffload import machine

PART_OF_MEMORY = 2
"""All that waits takes at most one part in so many of the memory that is free when the first one comes."""


class WaitingWeights:
    """Weights of ``nn.Linear`` that are above the budget, while a context is open."""

    def __init__(self) -> None:
        self._weights: list[tuple[weakref.ref[nn.Linear], weakref.ref[nn.Parameter], str]] = []
        self._limit_bytes: int | None = None

    def take(self, module: nn.Module, name: str, param: nn.Parameter, why: str) -> bool:
        """Whether a parameter waits from now on. ``why``: it is refused if it is still there at the end."""
        if type(module) is not nn.Linear or name != "weight":
            return False
        if self._limit_bytes is None:
            self._limit_bytes = machine.measure().memory_available_bytes // PART_OF_MEMORY
        if sum(each.nbytes for _, each, _ in self._alive()) + param.nbytes > self._limit_bytes:
            return False
        self._weights.append((weakref.ref(module), weakref.ref(param), why))
        return True

    def left(self) -> list[tuple[nn.Linear, str]]:
        """The layers that nobody has split, and why each is refused."""
        return [(module, why) for module, _, why in self._alive()]

    def _alive(self) -> Iterator[tuple[nn.Linear, nn.Parameter, str]]:
        for of_module, of_param, why in self._weights:
            module, param = of_module(), of_param()
            if module is not None and param is not None and module._parameters.get("weight") is param:
                yield module, param, why
