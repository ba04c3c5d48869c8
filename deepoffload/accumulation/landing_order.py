"""Gradients of micro-batches that go different ways land in the order of the micro-batches, too.

Where all micro-batches make the same visits, each gradient lands in that order by itself. Else one may be complete
early: a weight that two layers share gets its gradient when the first of them has been passed, and a micro-batch that
has skipped this layer is through with the weight at the second one. Its gradient then waits here for those of the
micro-batches before it. A sum has the same bits only if it is made in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from deepoffload.accumulation.micro_batch import MicroBatch, TurnPhase, Visit
from deepoffload.params.torch_private import get_grad, set_grad
from deepoffload.params.unit import ParamHandle


class WaitingGradient(NamedTuple):
    """A gradient that waits."""

    number: int
    param: Tensor
    handle: ParamHandle
    gradient: Tensor


class LandingOrder:
    """Args:
    places: of the visits in the forward; they grow along every path.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], places: dict[Visit, int]) -> None:
        self._all = micro_batches
        self._last: list[dict[ParamHandle, int]] = []
        for one in micro_batches:
            last: dict[ParamHandle, int] = {}
            for window, count in reversed(one.path):  # in backward the first visit comes last
                place = places.get((window, count), 0)
                last.update((handle, -place) for handle in window.handles())
            self._last.append(last)
        self._landed: set[tuple[int, ParamHandle]] = set()
        self._held: list[WaitingGradient] = []

    def holds_back(self, one: MicroBatch, param: Tensor, handle: ParamHandle) -> bool:
        """Whether a gradient that autograd has just completed has to wait. It is taken from the parameter then."""
        gradient = get_grad(param)
        if gradient is None or self._may_land(one.number, handle):
            self._landed.add((one.number, handle))
            return False
        self._held.append(WaitingGradient(one.number, param, handle, gradient))
        set_grad(param, None)
        return True

    def ready(self) -> Iterator[WaitingGradient]:
        """Those that need not wait any more, in the order in which they land."""
        while self._held:
            found = next((held for held in self._held if self._may_land(held.number, held.handle)), None)
            if found is None:
                return
            self._held = [held for held in self._held if held is not found]
            self._landed.add((found.number, found.handle))
            yield found

    def _may_land(self, number: int, handle: ParamHandle) -> bool:
        waiting = any(held.number < number and held.handle is handle for held in self._held)
        return not waiting and all(self._is_through(one, number, handle) for one in self._all[:number])

    def _is_through(self, earlier: MicroBatch, number: int, handle: ParamHandle) -> bool:
        """Whether an earlier micro-batch will land no gradient of this parameter any more."""
        if earlier.phase is TurnPhase.OVER:
            return True
        last = self._last[earlier.number].get(handle)
        if last is not None:
            return earlier.place > last
        if handle in self._last[number]:
            return True  # the weight belongs to modules, and the earlier one has called none of these
        return (earlier.number, handle) in self._landed
