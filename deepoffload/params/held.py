"""Which optimizer updates what; and leases that last until its step: of what autograd keeps by reference, where no door
of ours sees it used."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepoffload.copies.shown import ShownMemory
from deepoffload.memory.block import Block

if TYPE_CHECKING:
    from deepoffload.params.unit import ParamHandle


class HeldUntilStep:
    """The leases of one pager. Guarded by its lock.

    The backward that needs a weight comes before the step that updates it, so that step ends the lease. Steps of other
    optimizers say nothing: they may come in between, from any thread. What no optimizer updates is let go by any step:
    a graph that keeps a frozen weight is seen when the weight would leave memory.

    Args:
        memory_of: in which memory a block's tensors show its bytes.
    """

    def __init__(self, memory_of: Callable[[Block], ShownMemory]) -> None:
        self._memory_of = memory_of
        self._leases: dict[Any, Block] = {}
        self._updaters: weakref.WeakKeyDictionary[ParamHandle, weakref.WeakSet[object]]
        self._updaters = weakref.WeakKeyDictionary()
        self._owners: weakref.WeakKeyDictionary[ParamHandle, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._next_number = 0

    def updates(self, optimizer: object, handle: ParamHandle) -> None:
        """``optimizer`` updates ``handle`` for as long as it exists."""
        self._updaters.setdefault(handle, weakref.WeakSet()).add(optimizer)
        self._owners[handle] = weakref.ref(optimizer)
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._next_number
            self._next_number += 1

    def updaters(self, handle: ParamHandle) -> list[object]:
        """The optimizers that update ``handle``."""
        return list(self._updaters.get(handle, ()))

    def owner(self, handle: ParamHandle) -> Any:
        """The optimizer that was the last to be given ``handle``; None where there is none, or it is gone."""
        reference = self._owners.get(handle)
        return None if reference is None else reference()

    def number_of(self, optimizer: object) -> int | None:
        """The number of an optimizer among all that have updated parameters of this pager, in the order in which they
        were made. Programs that make the same ones give them the same numbers. None for one that is unknown."""
        return self._numbers.get(optimizer)

    def optimizers(self) -> dict[int, object]:
        """The optimizers that there are, by their numbers."""
        return {number: optimizer for optimizer, number in list(self._numbers.items())}

    def take(self, slot: Any, block: Block) -> None:
        """Lease the block of a parameter (``slot`` is its handle) or of its gradient."""
        if self._leases.get(slot) is not block:
            self._memory_of(block).acquire(block)
            self._leases[slot] = block

    def end_of_step(self, optimizer: object) -> None:
        """A step of ``optimizer`` is over."""
        for slot, block in list(self._leases.items()):
            updaters = self._updaters.get(slot.handle)
            if not updaters or optimizer in updaters:
                del self._leases[slot]
                self._memory_of(block).release(block)
