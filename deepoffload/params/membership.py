"""What is registered below a module, remembered without keeping it alive, and cheap to compare.

Parameters and modules arrive after a model was built (adapters, ``load_state_dict(assign=True)``, a new head); whoever
has hooks on a module asks at its next call whether anything has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_Refs = tuple[tuple[str, Callable[[], Any]], ...]


class Membership:
    """A snapshot of the parameters and submodules at and below one module."""

    def __init__(self, module: nn.Module) -> None:
        self._nodes: list[tuple[weakref.ref[nn.Module], _Refs, _Refs]] = [
            (weakref.ref(child), _references(child._parameters), _references(child._modules))
            for child in module.modules()
        ]

    def changed(self) -> bool:
        """True when a parameter or module was added, removed or replaced since."""
        for reference, parameters, modules in self._nodes:
            child = reference()
            if child is None or _differs(child._parameters, parameters) or _differs(child._modules, modules):
                return True
        return False


def _references(members: dict[str, Any]) -> _Refs:
    return tuple((key, _nothing if value is None else weakref.ref(value)) for key, value in members.items())


def _differs(members: dict[str, Any], references: _Refs) -> bool:
    if len(members) != len(references):
        return True
    return any(members.get(key) is not reference() for key, reference in references)


def _nothing() -> None:
    return None
