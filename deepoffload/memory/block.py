"""A block: the contiguous bytes of one kind (weights, gradients, a piece of optimizer state) that move together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from deepoffload.io.extents import Extent, SourceExtent
from deepoffload.io.ticket import Ticket
from deepoffload.memory.form import Form, shown_bytes
from deepoffload.native.aio import round_up
from deepoffload.schedule.block_state import BLOCK_TRANSITIONS, BlockState
from deepoffload.schedule.placement import BlockKind

Census = dict[BlockState, dict[int, "Block"]]
"""Blocks by state and id."""

Alias = Callable[[], bool]
"""Answers whether somebody still refers to a piece of memory that was taken from its block. See
[Note: aliases and leases] in ``params.slot``."""


class BlockOwner(Protocol):
    """What shows the bytes of a block to the program (the tensors of a unit).

    ``on_host``: it shows the arena's bytes. Else it shows a device's copy, and the arena may do as it likes with its
    own. ``installed``: tensors show them now.
    """

    @property
    def on_host(self) -> bool: ...

    @property
    def installed(self) -> bool: ...

    def can_release(self) -> bool:
        """True when nobody outside refers to the memory any more. Called for every candidate of an eviction: cheap."""

    def may_be_read_unseen(self) -> bool:
        """True while autograd may keep what is shown itself, and reads it without asking anybody."""

    def update_to_come(self) -> bool:
        """True while an optimizer step is still to change the bytes before anybody uses them."""

    def changed(self) -> bool:
        """True when the program wrote to the memory since the last call; the block is then dirty."""

    def edits(self) -> int:
        """How often ``changed`` has been True so far."""

    def aliases(self) -> list[Alias]:
        """One question for each part of the memory that somebody refers to now, still to be asked after release()."""

    def release(self) -> None:
        """The memory is taken away now: everything that shows it must stop doing so."""

    def before_gather(self) -> None:
        """All ranks are about to read this rank's part: make the update that is still to come, and store what the
        program has written."""

    def rewritten(self) -> None:
        """What is shown was overwritten with what is stored: that is no change by the program."""

    def relocate(self, offset: int) -> None:
        """The bytes have been moved to another arena offset."""


class Block:
    """One block. Only :class:`~deepoffload.memory.tier_manager.TierManager` changes ``state``, ``offset`` and
    ``extent``, but for a guess's :class:`~deepoffload.memory.kept_bytes.KeptBytes`.

    Attributes:
        offset: byte offset in the arena while resident, else None.
        leases: how many users need it to stay; above zero it is not evicted, and only the thread that has all leases
            moves it.
        leased_by: that thread, 0 when several have leases. It means nothing while there are none.
        nbytes: of its stored bytes, in the arena and on NVMe.
        forms: of its tensors; none where they are stored as they are shown.
        shown_nbytes: what the program is shown of it: what the forms reach to, where no more is said.
        room_bytes: what it takes in the arena, whole pages. Blocks of about the same size take the same, so that each
            fits where another was.
        is_brief: whether it will be gone at the end of the step, and is hardly ever used before.
        copying: how many copies between host memory and a device's are in flight from or to it; until they have ended
            the bytes neither move nor change.
    """

    __slots__ = (
        "id",
        "name",
        "kind",
        "nbytes",
        "forms",
        "_forms_nbytes",
        "room_bytes",
        "is_brief",
        "state",
        "offset",
        "extent",
        "leases",
        "leased_by",
        "copying",
        "ticket",
        "owner",
        "_census",
    )

    def __init__(
        self,
        block_id: int,
        name: str,
        kind: BlockKind,
        nbytes: int,
        census: Census,
        owner: BlockOwner | None = None,
        forms: tuple[Form, ...] = (),
        shown_nbytes: int | None = None,
    ) -> None:
        self.id = block_id
        self.name = name
        self.kind = kind
        self.nbytes = nbytes
        self.forms = forms
        self._forms_nbytes = shown_bytes(forms) if shown_nbytes is None else shown_nbytes
        self.room_bytes = nbytes
        self.is_brief = False
        self.state = BlockState.EMPTY
        self.offset: int | None = None
        self.extent: Extent | None = None
        self.leases = 0
        self.leased_by = 0
        self.copying = 0
        self.ticket: Ticket | None = None
        self.owner = owner
        self._census = census
        census[self.state][block_id] = self

    def to(self, state: BlockState) -> None:
        """Change state along the transition table; anything else is a fault in deepoffload itself."""
        if state not in BLOCK_TRANSITIONS[self.state]:
            raise RuntimeError(f"block {self.name}: no transition from {self.state.name} to {state.name}")
        del self._census[self.state][self.id]
        self._census[state][self.id] = self
        self.state = state

    @property
    def shown_nbytes(self) -> int:
        return self._forms_nbytes if self.forms else self.nbytes

    @property
    def shown_room_bytes(self) -> int:
        """What a copy of it takes."""
        return round_up(self.shown_nbytes) if self.forms else self.room_bytes

    @property
    def resident(self) -> bool:
        return self.offset is not None and self.state is not BlockState.READING

    def __repr__(self) -> str:
        return f"<Block {self.id} {self.name} {self.kind.name} {self.nbytes} B {self.state.name} leases={self.leases}>"


def is_backed(block: Block) -> bool:
    """Whether a file of somebody else has a block's bytes: it takes no room on NVMe until it is written to."""
    return isinstance(block.extent, SourceExtent) and block.state is not BlockState.DIRTY


def can_hide(owner: BlockOwner) -> bool:
    """Whether what shows a block can stop to, and is asked when somebody wants to see it again."""
    return owner.can_release() and not owner.may_be_read_unseen()


def host_view_owner(block: Block) -> BlockOwner | None:
    """What shows the arena's bytes of a block to the program, if anything does."""
    owner = block.owner
    return owner if owner is not None and owner.on_host else None


class DeviceCopies(Protocol):
    """What a device holds of the blocks (implemented by :class:`deepoffload.copies.copy_memory.CopyMemory`)."""

    def end_copies(self, block: Block) -> None:
        """Wait for the copies in flight from or to a block's host memory."""

    def end_some_copies(self) -> bool:
        """Wait until one of the copies in flight, from or to any block's, has ended. False when there are none."""

    def forget(self, block: Block) -> None:
        """Drop the device's copy: the block's bytes are lost."""

    def shows(self, block: Block) -> bool:
        """Whether there is a copy of a block."""

    def keeps(self, block: Block) -> bool:
        """Whether a block of optimizer state lives on the device."""

    def keep(self, block: Block) -> None:
        """From now on it does. What the host has of it goes there."""

    def bring_home(self, block: Block) -> None:
        """Where the device's copy of a block that is kept there alone is right: make the host's bytes right."""

    def outdated(self, block: Block) -> None:
        """The host's bytes of a block are about to change: a copy that is kept on the device goes."""
