"""When the last gradient of a unit has landed: what works on a unit's gradients together begins then."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deepoffload.params.unit import ParamHandle


class UnitCompletion:
    """Which gradients have landed in this step, and which of them was its unit's last.

    Autograd does not say which gradients will come: a unit is complete when all those have landed that are expected of
    it. A parameter that the loss does not depend on keeps its unit incomplete for the whole step.

    Args:
        expects: whether a gradient of this parameter has to land before its unit is complete. It is asked at each
            landing, since parameters may be frozen or deleted at any time.

    Attributes:
        handles: of the gradients that have landed.
    """

    def __init__(self, expects: Callable[[ParamHandle], bool]) -> None:
        self._expects = expects
        self.handles: set[ParamHandle] = set()

    def landed(self, handle: ParamHandle) -> list[ParamHandle]:
        """A gradient has landed. Returns all expected parameters of its unit, in their order, when none is missing any
        more, else an empty list.

        A gradient that is not expected completes no unit. One that lands in a complete unit completes it again: whether
        that may be is the caller's rule.
        """
        unit = handle.unit
        if unit is None or not self._expects(handle):
            return []
        self.handles.add(handle)
        expected = [other for other in unit.handles if self._expects(other)]
        return expected if self.handles.issuperset(expected) else []

    def start_step(self, handles: Iterable[ParamHandle]) -> None:
        """The gradients of these that land from now on belong to the next step."""
        self.handles.difference_update(handles)
