"""Which gradient of a unit is its last one in a step, where a program may run several backwards before it steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from deepoffload.optim.unit_completion import UnitCompletion
from deepoffload.params.unit import ParamHandle, Unit

STEPS_VARYING = 32
"""For so many steps a unit counts as one that has other numbers of gradients in each step."""


class LastGradients:
    """Nothing says which backward is the last one before a step, unless the program does (:meth:`announce`). Else the
    last step tells: if as many gradients have landed in a unit as in that, its last one has landed. A wrong answer
    costs an undone update, never a wrong number.

    A unit that micro-batches leave out, as layer drop does, has other numbers in each step. There the backwards are
    counted: some parameter gets a gradient in all of them. In the last one, as many gradients complete the unit as in
    the last backward that it was in.

    Args:
        expects: whether a gradient of this parameter has to land before its unit is complete.
    """

    def __init__(self, expects: Callable[[ParamHandle], bool]) -> None:
        self._expects = expects
        self._completion = UnitCompletion(expects)
        self._counts: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        self._is_last: bool | None = None
        self._varying: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        self._landings: weakref.WeakKeyDictionary[ParamHandle, int] = weakref.WeakKeyDictionary()
        self._backward = self._backwards_before = 0
        self._in_this: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        self._in_one: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()

    def announce(self, is_last: bool | None) -> None:
        """The next backward is the last one of its step, or is not; None: nobody says so any more."""
        if is_last and not self._is_last:
            self._completion = UnitCompletion(self._expects)
        self._is_last = is_last

    def landed(self, handle: ParamHandle) -> bool:
        """A gradient has landed; whether it is its unit's last one."""
        unit = handle.unit
        if unit is None:
            return False
        count = self._counts[unit] = self._counts.get(unit, 0) + 1
        if self._is_last is not None:
            return self._is_last and bool(self._completion.landed(handle))
        landings = self._landings[handle] = self._landings.get(handle, 0) + 1
        if landings > self._backward:
            self._begin_backward(landings)
        here = self._in_this[unit] = self._in_this.get(unit, 0) + 1
        if self._varying.get(unit, 0):
            return self._backward == self._backwards_before and here == self._in_one.get(unit)
        return count == self._before.get(unit)

    def _begin_backward(self, number: int) -> None:
        self._backward = number
        self._in_one.update(self._in_this)
        self._in_this.clear()

    def start_step(self, units: Iterable[Unit], *, stepped: bool) -> None:
        """Gradients of these units that land from now on belong to the next step. ``stepped``: there was a step, which
        the next one is expected to resemble; else gradients were only dropped."""
        if stepped and self._backward:
            self._backwards_before = self._backward
        self._begin_backward(0)
        self._landings.clear()
        for unit in units:
            count = self._counts.pop(unit, None)
            if stepped and count is not None:
                varies = self._before.get(unit, count) != count
                self._varying[unit] = STEPS_VARYING if varies else max(0, self._varying.get(unit, 0) - 1)
                self._before[unit] = count
            self._completion.start_step(unit.handles)
        if self._is_last is not None:
            self._is_last = False  # who has said it once says it each time
