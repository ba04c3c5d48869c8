"""The order in which the program uses units: what is remembered of it, and what it says of the next use.

It is made before the memory is, which asks it who must leave: it is the tier manager's ``EvictionPolicy``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from deepoffload.memory.block import Block
from deepoffload.params.kept_attributes import KeptAttributes
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.slot import TensorSlot
from deepoffload.params.unit import Unit
from deepoffload.schedule.activation_room import ActivationRoom
from deepoffload.schedule.events import Event, UseKey
from deepoffload.schedule.postponed import with_updates_postponed
from deepoffload.schedule.trace import Trace
from deepoffload.schedule.visits import VisitOrder

_UNKNOWN = 1e12
"""Distance to the next use where the trace knows none: farther than all that it knows."""


def phase_name(key: UseKey, units: Iterable[Unit]) -> str:
    """What people call an event: "forward layers.3"."""
    phase, numbers = key
    unit = next((unit.name for unit in units if unit.index in numbers[:1]), "")
    return f"{phase.value} {unit}"


class UseOrder:
    """Guarded by the lock of the memory that it is the policy of.

    Args:
        graphs: those that have to know when a block leaves that was to stay.
        prefetch: False for the serial reference, in which no event counts as predicted.

    Attributes:
        trace: the events of the steps, and when each block is used next.
        visits: the order in which micro-batches that take turns visit units.
        activations: whether memory holds those of several micro-batches.
        attributes: of modules, that forwards of micro-batches change; None before one has shown them.
        predicted: ids of the blocks of the present event, when the trace expected it.
        last_key: of the present event; None after the end of a step. key_before: of the event before it.
        backward_of: the unit of the present event, if it is one of backward.
        landing: ids of blocks in which gradients of several ranks land next. Their event may be over: the other ranks'
            parts come later, and by the order alone such a block would leave and be read again.
    """

    def __init__(self, graphs: OpenGraphs, *, prefetch: bool = True) -> None:
        self.trace = Trace()
        self.visits = VisitOrder()
        self.activations = ActivationRoom()
        self.attributes: KeptAttributes | None = None
        self.predicted: frozenset[int] = frozenset()
        self.last_key: UseKey | None = None
        self.key_before: UseKey | None = None
        self.backward_of: Unit | None = None
        self.landing: set[int] = set()
        self._together: Sequence[TensorSlot] = ()
        self._postponed: frozenset[int] = frozenset()
        self._graphs = graphs
        self._prefetch = prefetch
        self._clock = 0
        self._stamps: dict[int, int] = {}

    def observe(self, key: UseKey, blocks: tuple[int, ...], backward_of: Unit | None = None) -> None:
        """An event of the program begins, in which it uses ``blocks``. The same one again is no other event: the caller
        compares ``last_key``."""
        self.key_before, self.last_key = self.last_key, key
        self.backward_of = backward_of
        predicted = self.trace.observe(Event(key, blocks))
        self.predicted = frozenset(blocks) if predicted and self._prefetch else frozenset()

    def postpone_updates(self, units: Iterable[int]) -> None:
        """The step that is about to end cannot keep the updates that these units had inside its backward: they come
        before the units' next forward, where later steps have them inside backward again."""
        self._postponed = self._postponed.union(units)

    def end_of_step(self) -> None:
        """An optimizer step is finished: the recorded order becomes the cycle."""
        postponed, self._postponed = self._postponed, frozenset()
        self.trace.end_of_step(spoiled=bool(postponed))
        if postponed:
            self.trace.expect_once(partial(with_updates_postponed, units=postponed))
        self._graphs.end_of_step()
        self.landing.clear()
        self.last_key = self.key_before = None
        self.backward_of = None

    def stamp(self, block: Block) -> None:
        """A block is used now."""
        self._clock += 1
        self._stamps[block.id] = self._clock

    def next_use(self, block_id: int) -> float:
        """Distance to the next use; where the order is unknown, farther the longer ago the last use was (LRU)."""
        if block_id in self.landing:
            return 0.0
        distance = self.trace.next_use(block_id)
        if distance < math.inf:
            return distance
        return _UNKNOWN - self._stamps.get(block_id, 0)

    def before_leaving(self, block: Block) -> None:
        """A block that was to stay in memory leaves it."""
        self._graphs.refuse_unhooked(block)

    @contextmanager
    def taking(self, together: Sequence[TensorSlot]) -> Iterator[None]:
        """One of these tensors comes to memory, for an operation that takes all of them."""
        self._together = together
        try:
            yield
        finally:
            self._together = ()

    def wanted_together(self) -> list[Block]:
        """The blocks of the tensors that the running operation takes."""
        blocks = (slot.block for slot in self._together if slot.pager.order is self)
        return list(dict.fromkeys(block for block in blocks if block is not None))
