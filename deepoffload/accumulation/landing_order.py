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

from deepoffload.accumulation.micro_batch import MicroBatch, TurnPhase
from deepoffload.params.torch_private import get_grad, set_grad
from deepoffload.params.unit import ParamHandle


class WaitingGradient(NamedTuple):
    """A gradient that waits."""

    number: int
    param: Tensor
    handle: ParamHandle
    gradient: Tensor


class LandingOrder:
    """Of one call. It asks each micro-batch which way it has gone, as soon as its forward is over."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._all = micro_batches
        self._first: dict[int, dict[ParamHandle, int]] = {}
        self._landed: set[tuple[int, ParamHandle]] = set()
        self._held: list[WaitingGradient] = []

    @property
    def is_needed(self) -> bool:
        """Whether gradients wait, or may have to. To be asked when all forwards are over."""
        return bool(self._held) or any(one.path != self._all[0].path for one in self._all)

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
        if earlier.phase is TurnPhase.FORWARD:
            return False
        first = self._first_uses(earlier).get(handle)
        if first is not None:
            return earlier.reached < first
        if handle in self._first_uses(self._all[number]):
            return True  # the weight belongs to modules, and the earlier one has called none of these
        return (earlier.number, handle) in self._landed

    def _first_uses(self, one: MicroBatch) -> dict[ParamHandle, int]:
        """Which visit of a micro-batch used a parameter first. Backward comes to this one last."""
        if one.number not in self._first:
            visits = reversed(list(enumerate(one.path)))
            self._first[one.number] = {handle: at for at, (window, _) in visits for handle in window.handles()}
        return self._first[one.number]
