"""Gives disk space back that guesses take, where somebody else has none."""

from __future__ import annotations

from collections.abc import Callable

from deepoffload.memory.block import Block


class RoomGuard:
    """A :class:`~deepoffload.memory.guards.BlockGuard` that needs nothing but to hear of a want of room.

    Args:
        undo_one: undo a guess that does not concern a block; False where there is none.
    """

    def __init__(self, undo_one: Callable[[Block], bool]) -> None:
        self.make_room = undo_one

    def before_change(self, block: Block) -> None:
        """What a guess changes it has kept before."""

    def before_loss(self, block: Block) -> None:
        """Likewise."""

    def before_device_change(self, block: Block) -> None:
        """Nothing is guessed of what lives on a device."""

    def before_showing(self, block: Block) -> None:
        """Weights of a guess are shown only after it was undone or confirmed."""

    def updated(self, block: Block) -> None:
        """That is the guess's own update."""

    def finish(self) -> None:
        """Nothing of a guess outlives the engine."""
