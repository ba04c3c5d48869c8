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
_Node = tuple["weakref.ref[nn.Module]", _Refs, _Refs, int]


class Membership:
    """A snapshot of the parameters and submodules at and below one module."""

    def __init__(self, module: nn.Module) -> None:
        self._nodes: list[_Node] = [
            (weakref.ref(child), _references(child._parameters), _references(child._modules), len(child.__dict__))
            for child in module.modules()
        ]

    def changed(self) -> bool:
        """True when a parameter or module was added, removed or replaced since, or a module got another attribute."""
        for reference, parameters, modules, attributes in self._nodes:
            child = reference()
            if child is None or len(child.__dict__) != attributes:
                return True
            if _differs(child._parameters, parameters) or _differs(child._modules, modules):
                return True
        return False


def _references(members: dict[str, Any]) -> _Refs:
    return tuple((key, _nothing if value is None else weakref.ref(value)) for key, value in members.items())


def _differs(members: dict[str, Any], references: _Refs) -> bool:
    if len(members) != len(references):
        return True
    for key, reference in references:  # any() over a generator takes three times as long
        if members.get(key) is not reference():
            return True
    return False


def _nothing() -> None:
    return None
