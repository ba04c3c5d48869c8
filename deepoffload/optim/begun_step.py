"""A step that has begun: whether another call of ``step()`` resumes it or makes the next one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor

from deepoffload.optim.gradients import Gradients
from deepoffload.params.unit import ParamHandle


class BegunStep:
    """The gradients that a step is made of, as they are when it begins.

    Args:
        engines: the gradients of every engine whose parameters the step updates.
        ordinary: the optimizer's ordinary parameters.
    """

    def __init__(self, engines: Iterable[Gradients], ordinary: Iterable[Tensor]) -> None:
        self.changes = {gradients: gradients.changes for gradients in engines}
        self._ordinary = [(weakref.ref(param), _seen(param.grad)) for param in ordinary] if self.changes else []

    def is_repeated(self, paged: Mapping[Gradients, Iterable[ParamHandle]]) -> bool:
        """Whether the optimizer's gradients, those of ``paged`` among them, are still the same ones. What happens to
        gradients of other parameters does not count: they belong to other steps."""
        if not self.changes:
            return False
        for gradients, handles in paged.items():
            if gradients not in self.changes or gradients.changed_since(self.changes[gradients], handles):
                return False
        present = ((reference(), seen) for reference, seen in self._ordinary)
        return all(param is None or _same(seen, param.grad) for param, seen in present)


_Seen = tuple[weakref.ref[Tensor], int] | None
"""A gradient object, and its version."""


def _seen(grad: Tensor | None) -> _Seen:
    return None if grad is None else (weakref.ref(grad), grad._version)


def _same(seen: _Seen, grad: Tensor | None) -> bool:
    if seen is None or grad is None:
        return seen is None and grad is None
    return seen[0]() is grad and seen[1] == grad._version
