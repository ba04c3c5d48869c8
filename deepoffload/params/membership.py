"""What is registered below a module, remembered without keeping it alive, and cheap to compare.

Parameters and modules arrive after a model was built (adapters, ``load_state_dict(assign=True)``, a new head);
hooks on a module ask at its next call whether anything has changed.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Membership:
    """A snapshot of the parameters and submodules at and below one module.

    The addresses of the objects stand for them. That is exact because the death of any of them counts as a change:
    before that no other object can have its address. Everything is compared in one list, since every call asks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._deaths = _Deaths()
        self._modules = [weakref.ref(child, self._deaths) for child in module.modules()]
        params = (param for child in module.modules() for param in child._parameters.values())
        self._params = [weakref.ref(param, self._deaths) for param in params if param is not None]
        self._members = self._now()

    def changed(self) -> bool:
        """True when a parameter or module was added, removed or replaced since, or a module got another attribute."""
        return self._deaths.any or self._now() != self._members

    def _now(self) -> list[int]:
        """For each module how many attributes it has, and what is registered in it."""
        members: list[int] = []
        for reference in self._modules:
            child = reference()
            if child is None:
                break  # collected just now
            attributes = child.__dict__  # what nn.Module's own lookup of attributes costs is most of this
            members.append(len(attributes))
            params, modules = attributes["_parameters"], attributes["_modules"]
            if params:
                members += map(id, params.values())
            if modules:
                members += map(id, modules.values())
        return members


class _Deaths:
    """Whether one of the objects has been deleted."""

    __slots__ = ("any",)

    def __init__(self) -> None:
        self.any = False

    def __call__(self, _: Any) -> None:
        self.any = True
