"""Those who still need what blocks hold now, when it is about to be lost: a save that continues while training does.

Most of the time there is nobody. The tier manager tells all of them of what it is about to do, under its lock.
"""

from __future__ import annotations

from typing import Protocol

from deepoffload.memory.block import Block


class BlockGuard(Protocol):
    """Is told before the bytes of a block change, go, or can be changed without a word. It takes what it needs before
    it returns: holds the block's extent where that has the bytes, or copies them.

    All of it is called under the memory's lock, also for blocks that the guard knows nothing of. It must not raise.
    """

    def before_change(self, block: Block) -> None:
        """The host's bytes are about to change, or to be overwritten in whole by somebody who has not looked at them. A
        block that is ``EMPTY`` has none there."""

    def before_loss(self, block: Block) -> None:
        """The bytes are about to go on every tier. Those of an ``EMPTY`` block are on a device alone."""

    def before_device_change(self, block: Block) -> None:
        """The bytes of a block that lives on a device are about to change there."""

    def before_showing(self, block: Block) -> None:
        """Tensors of the program are about to show the bytes in host memory. From here on it may change them where no
        door sees it, and :meth:`before_change` comes only when that is noticed."""

    def updated(self, block: Block) -> None:
        """An optimizer's update that was still to come is in the bytes now."""

    def make_room(self, block: Block) -> bool:
        """There is no disk space for a fresh extent of ``block``. True when the guard has let go of one, best of the
        block's present one: then that is written again."""

    def finish(self) -> None:
        """All blocks are about to go: return when nothing is needed any more. The one call without the lock."""


class Guards:
    """All guards of one tier manager."""

    def __init__(self) -> None:
        self._all: tuple[BlockGuard, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, guard: BlockGuard) -> None:
        self._all = (*self._all, guard)

    def remove(self, guard: BlockGuard) -> None:
        self._all = tuple(other for other in self._all if other is not guard)

    def before_change(self, block: Block) -> None:
        for guard in self._all:
            guard.before_change(block)

    def before_loss(self, block: Block) -> None:
        for guard in self._all:
            guard.before_loss(block)

    def before_device_change(self, block: Block) -> None:
        for guard in self._all:
            guard.before_device_change(block)

    def before_showing(self, block: Block) -> None:
        for guard in self._all:
            guard.before_showing(block)

    def updated(self, block: Block) -> None:
        for guard in self._all:
            guard.updated(block)

    def make_room(self, block: Block) -> bool:
        return any(guard.make_room(block) for guard in self._all)

    def finish(self) -> None:
        for guard in self._all:
            guard.finish()
