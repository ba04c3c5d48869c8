"""One block's bytes on a device, and who uses them there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepoffload.copies.rank_device import Coming
from deepoffload.memory.block import Block
from deepoffload.schedule.placement import BlockKind


@dataclass(eq=False)
class BlockCopy:
    """A block's bytes on the device: like the host's, or ``dirty``.

    Attributes:
        offset: where they lie in the device's arena.
        leases: how many users need them to stay.
        leased_by: the thread that has all leases, 0 when several have some. It means nothing while there are none.
        dirty: the program wrote to them, and they alone are right.
        ready: the event of their coming, until it is known to have happened.
        streams: on which they have been used, by id.
        rewriting: it is gathered again while the program has views of it.
        over: events that were recorded when their last use was over, None while they are used.
        stale: other bytes are stored by now. The range is kept for these, and nothing shows it.
    """

    block: Block
    offset: int
    leases: int = 0
    leased_by: int = 0
    dirty: bool = False
    ready: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    over: list[Any] | None = None
    rewriting: bool = False
    stale: bool = False

    @property
    def coming(self) -> Coming | None:
        """The event of its coming from other ranks, until that has happened: before, the copy cannot go."""
        ready = self.ready
        return ready if isinstance(ready, Coming) and not ready.arrived else None

    def may_go(self) -> bool:
        """Whether nobody in the program refers to what is shown of it."""
        return self.block.owner is None or self.block.owner.can_release()

    def is_dirty(self) -> bool:
        """``dirty``, after a look at what the program has written where no door saw it. Weights are looked at also
        where a door has seen something else, for their owner notes which of them have changed."""
        owner = self.block.owner
        asks = not self.dirty or self.block.kind is BlockKind.WEIGHT
        if owner is not None and asks and not self.rewriting and owner.changed():
            self.dirty = True
        return self.dirty
