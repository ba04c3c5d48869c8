"""Life and death: parameters and units come and go as the program keeps them, and the end of all ends the engine."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

from deepoffload.errors import ClosedError
from deepoffload.memory.lock import BooksLock
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.ports import GradientDoor, PagerOwner
from deepoffload.params.unit import Unit


class Lifetime:
    """Counts what is alive. The program owns its parameters; this only notices that they are gone.

    Args:
        owner: is told when nothing is alive any more; None when nobody has to know.

    Attributes:
        closed_because: why nothing can be used any more; None while it can.
        is_torn: then, because the books of memory are wrong.
        deaths: of parameters and modules since units were last looked through.
        minds_deaths: False when it no longer matters who dies.
        users: who trains the models, and has not ended: the last of them ends the engine.
        unit_count: the number of the next unit. Several ranks have the same one where they make units together.
    """

    def __init__(self, lock: BooksLock, owner: PagerOwner | None) -> None:
        self.closed_because: str | None = None
        self.is_torn = False
        self.deaths = 0
        self.minds_deaths = True
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = lock
        self._owner = owner
        self._alive = 0
        self.unit_count = 0
        lock.when_torn = self._torn

    def parameter_registered(self) -> None:
        with self._lock:
            self._alive += 1

    def parameter_dropped(self, _: Any) -> None:
        """A parameter was deleted. May run at any time, in any thread: only count, and end an engine that shows
        nothing."""
        self._alive -= 1
        self.deaths += 1
        if self._alive == 0 and self._owner is not None and self.minds_deaths:
            self._owner.all_dead()

    def ignore_deaths(self) -> None:
        """From now on nothing happens when parameters, modules or calls die: the engine has ended, or the process ends.

        The interpreter empties modules on its way out, in an unknown order. What runs when an object dies then finds
        None in the place of every function and class.
        """
        self.minds_deaths = False

    def close(self, because: str) -> None:
        """Nothing can be used from now on. The first reason is the one that is told."""
        self.closed_because = self.closed_because or because

    def _torn(self, because: str) -> None:
        self.is_torn = True
        self.close(because)

    def refuse_closed(self, name: str) -> None:
        raise ClosedError(f"{name or 'the model'} belongs to a closed engine: {self.closed_because}")

    def refuse_torn(self, name: str) -> None:
        """To be called before memory is given back, which ordinarily goes on in an engine that has ended."""
        if self.is_torn:
            self.refuse_closed(name)

    # -- units -----------------------------------------------------------------------------------------------------

    def new_unit_index(self) -> int:
        """A number that no unit of this pager ever had."""
        self.unit_count += 1
        return self.unit_count - 1

    def free_dead_units(
        self,
        units: list[Unit],
        tiers: TierManager,
        gradients: GradientDoor | None,
        only: Container[int] | None = None,
    ) -> list[Unit]:
        """Give back what units hold of which every parameter was deleted (a replaced head, merged adapters).

        Args:
            only: those with these indices; all when not said.

        Returns:
            The units that are gone.
        """
        self.deaths = 0
        gone = []
        for unit in list(units):
            blocks = unit.blocks()
            if any(handle.tensor is not None for handle in unit.handles) or any(block.leases for block in blocks):
                continue
            if only is not None and unit.index not in only:
                continue
            gone.append(unit)
            units.remove(unit)
            if gradients is not None:
                gradients.forget(unit)
            for block in blocks:
                tiers.remove(block)
        return gone
