"""One block's bytes on a device, and who uses them there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepoffload.memory.block import Block


@dataclass(eq=False)
class BlockCopy:
    """A block's bytes on the device: like the host's, or ``dirty``.

    Attributes:
        offset: where they lie in the device's arena.
        leases: how many users need them to stay.
        dirty: the program wrote to them, and they alone are right.
        ready: the event of their coming, until it is known to have happened.
        streams: on which they have been used, by id.
        over: events that were recorded when their last use was over, None while they are used.
    """

    block: Block
    offset: int
    leases: int = 0
    dirty: bool = False
    ready: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    over: list[Any] | None = None

    def may_go(self) -> bool:
        """Whether nobody in the program refers to what is shown of it."""
        return self.block.owner is None or self.block.owner.can_release()

    def is_dirty(self) -> bool:
        """``dirty``, after a look at what the program has written where no door saw it."""
        owner = self.block.owner
        if owner is not None and not self.dirty and owner.changed():
            self.dirty = True
        return self.dirty
