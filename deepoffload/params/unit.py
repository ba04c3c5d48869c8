"""A unit: the parameters that move together, and the blocks that hold their weights, gradients and optimizer state."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from deepoffload.io.mapped_origin import SourceRange
from deepoffload.memory.block import Alias, Block
from deepoffload.native.cpu_adam import StateDType, StateLayout
from deepoffload.params.layout import PieceLayout, TensorRun, whole_tensors
from deepoffload.params.ports import PagerPort
from deepoffload.params.shards import ShardLayout
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import count_change, outside_user_modes, version_of
from deepoffload.schedule.block_state import BlockState

if TYPE_CHECKING:
    import torch

    from deepoffload.copies.shown import ShownMemory


class UnitState(enum.Enum):
    """What the parameters of a unit show."""

    EVICTED = "stand-ins; the bytes are on NVMe, or nowhere yet"
    FETCHING = "stand-ins; the bytes are on their way, or have arrived and nobody used them yet"
    RESIDENT = "their bytes in the arena"


class PendingUpdate(Protocol):
    """An optimizer step that a unit still has to make (implemented by :class:`deepoffload.optim.update.HostUpdate`), or
    has made before anybody asked for it (:class:`deepoffload.optim.speculation.guess.Guess`).

    Attributes:
        is_guess: it is made, and undone when somebody looks at the unit before the step.
    """

    @property
    def is_guess(self) -> bool: ...

    def apply(self, unit: Unit) -> None:
        """Make it, or undo a guess; the unit's ``pending`` then is None."""

    def needs(self, handle: ParamHandle) -> bool:
        """Whether it will use the gradient of ``handle``."""

    def blocks_to_change(self, unit: Unit) -> list[Block] | None:
        """The blocks of the unit that it will change; None where it will also make or lay out state, or where they hold
        what nobody may see."""


class ParamHandle(TensorSlot):
    """Everything deepoffload knows of one parameter.

    Attributes:
        master_stale: the program changed the weight; its 16-bit remainder no longer belongs to it and counts as zero.
        edits: how often a change by the program was noticed after it had been made.
        mapped_copy: a copy with an address, while a value of a state dict has been asked for one.
        windows: of which modules' calls it is part.
        gathered: how many open ``GatheredParameters`` name it.
        edited_alone: how many of these let one rank edit it for all of them.
        version: torch's in-place counter when deepoffload last looked.
        origin: which bytes of a checkpoint the parameter was registered with; None where that is not known.
        uncompared: checksum of what the program has written past the doors. The ranks compare it when they step.
        updated_after: which forward made the last graph before its last update (``OpenGraphs.forwards``).
        state_owner: the token of the optimizer whose state the unit's pieces hold for this parameter.
    """

    __slots__ = (
        "unit",
        "state_owner",
        "master_stale",
        "edits",
        "version",
        "escape_crc",
        "mapped_copy",
        "uncompared",
        "updated_after",
        "windows",
        "gathered",
        "edited_alone",
        "origin",
    )

    def __init__(
        self, pager: PagerPort, name: str, tensor: Tensor, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> None:
        super().__init__(pager, name, tensor, tensor.shape, dtype, stride, tensor.device)
        pager.life.parameter_registered()
        self.unit: Unit | None = None
        self.state_owner: object | None = None
        self.master_stale = False
        self.edits = 0
        self.version = 0
        self.updated_after = 0
        self.escape_crc: int | None = None
        self.uncompared: int | None = None
        self.windows: set[int] = set()
        self.gathered = 0
        self.edited_alone = 0
        self.mapped_copy: weakref.ref[Any] | None = None
        self.origin: SourceRange | None = None

    @property
    def handle(self) -> ParamHandle:
        """The parameter's handle, as its gradient's slot has it, too."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Pickled along when a parameter is pickled inside a window; the copy belongs to no engine.
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, object]) -> ParamHandle:
        return self

    def note_escape(self) -> None:
        """An alias that moves no version counter was handed out: remember the bytes, to see whether it was written
        to."""
        if self.escape_crc is None:
            self.escape_crc = self.crc()

    def changed(self) -> bool:
        """True when the program wrote to the resident bytes since the last look; then the master follows the weight."""
        tensor = self.tensor
        if tensor is None or self.is_to_be_updated():
            return False  # other memory given since the step (a change that passes no door) comes after its update
        version = version_of(tensor)
        changed = version != self.version
        if self.displaced():
            self.take_back()
            changed = True
        self.version = version
        if self.escape_crc is not None:
            crc = self.crc()
            changed |= crc != self.escape_crc
            self.escape_crc = crc if self.aliased() else None
        self.master_stale |= changed
        self.edits += changed
        if changed and self.is_shared():
            self.uncompared = self.crc()
        return changed

    def is_shared(self) -> bool:
        """Whether all ranks have to edit it alike: each stores a part of it, and the program has not said that one of
        them edits it for all."""
        return self.pager.link is not None and self.unit is not None and not self.edited_alone

    def take_back_if_set(self, tensor: Tensor) -> None:
        if version_of(tensor) != self.version and self.displaced():
            self.take_back()

    def is_to_be_updated(self) -> bool:
        return self.unit is not None and self.unit.pending is not None

    def taken(self) -> None:
        self.master_stale = True

    def count_update(self) -> None:
        """An update of ours is decided on: graphs that have kept the weight no longer hold, as with torch's optimizers.
        That is no edit by the program."""
        tensor = self.tensor
        if tensor is not None:
            count_change(tensor)
            self.version += 1
            self.updated_after = self.pager.graphs.forwards

    def is_in_open_graph(self) -> bool:
        """Whether a graph may have kept the weight without our hooks since it was last updated."""
        graphs, tensor = self.pager.graphs, self.tensor
        if tensor is None:
            return False
        return (self.updated_after if tensor.requires_grad else graphs.forwards_stepped) < graphs.forwards

    def updated(self) -> None:
        """Our own update has changed the resident bytes."""
        self.master_stale = False
        self.rewritten()

    def rewritten(self) -> None:
        """We rewrote bytes that the program holds a view of: refresh the checksum, so that this does not count as the
        program's edit."""
        if self.escape_crc is not None:
            self.escape_crc = self.crc() if self.aliased() else None

    def compared(self, crc: int) -> None:
        """All ranks have the same bytes after an edit by a door, those that were written past the doors before it
        included; ``crc`` is their checksum."""
        self.uncompared = None
        if self.escape_crc is not None:
            self.escape_crc = crc if self.aliased() else None


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Which arrays of optimizer state a piece holds (fields of the kernels' ``Segment``), and in which type.

    ``whole``: one parameter in a piece is there with all its elements, except one that is larger than a piece: that has
    separate pieces. The arrays may have any names then.
    """

    fields: tuple[str, ...]
    dtype: StateDType
    whole: bool = False


PLAIN_FORMAT = StateFormat(("exp_avg", "exp_avg_sq"), StateDType.FP32)
"""What pieces are planned with, before an optimizer says what it needs."""


class StatePiece:
    """A piece of a unit's optimizer state: one block, and the layout of the arrays in it."""

    __slots__ = ("block", "layout", "kind", "handles", "format")

    def __init__(
        self,
        block: Block,
        layout: PieceLayout,
        kind: StateLayout,
        handles: list[ParamHandle],
        state_format: StateFormat = PLAIN_FORMAT,
    ) -> None:
        self.format = state_format
        self.block = block
        self.layout = layout
        self.kind = kind
        self.handles = handles


class BlockView:
    """Owner of a block whose bytes are shown by tensor slots.

    Args:
        memory: in which they are shown; the pager's when not said.
    """

    def __init__(self, pager: PagerPort, memory: ShownMemory | None = None) -> None:
        self.pager = pager
        self.memory = memory if memory is not None else pager.memory
        self.on_host = self.memory.on_host
        self.slots: list[TensorSlot] = []
        self.installed = False
        self.retired: list[Alias] = []

    def may_be_read_unseen(self) -> bool:
        return False

    def update_to_come(self) -> bool:
        return False

    def changed(self) -> bool:
        return False

    def edits(self) -> int:
        return 0

    def looked_at(self) -> bool:
        """True while the program has views of tensors that are shown no more."""
        self.retired = [alias for alias in self.retired if alias()]
        return bool(self.retired)

    def can_release(self) -> bool:
        if self.retired and self.looked_at():
            return False
        return not self.installed or not any(slot.aliased() for slot in self.slots)

    def before_gather(self) -> None:
        """Nothing to do: nobody but its owner changes the block."""

    def rewritten(self) -> None:
        """Nothing to do, likewise."""

    def aliases(self) -> list[Alias]:
        shown = [slot.alias() for slot in self.slots if slot.aliased()] if self.installed else []
        return [*shown, *self.retired]

    def release(self) -> None:
        self.retired = []
        if self.installed:
            self.installed = False
            with outside_user_modes():
                for slot in self.slots:
                    self.pager.forget_storage(slot)
                    slot.uninstall()

    def relocate(self, offset: int) -> None:
        if self.installed:
            self.release()
            self.install()

    def install(self) -> None:
        """Show the bytes through every tensor object of the block; through none of them when one of them fails."""
        if self.installed:
            return
        guards = self.pager.tiers.guards
        if guards and self.on_host:
            for block in {slot.block for slot in self.slots if slot.block is not None}:
                guards.before_showing(block)
        self.installed = True
        try:
            with outside_user_modes():
                for slot in self.slots:
                    slot.install()
                    self.pager.remember_storage(slot)
        except BaseException:
            self.release()
            raise


class WeightView(BlockView):
    """Owner of a unit's weights: knows when the program wrote to them behind the doors."""

    def may_be_read_unseen(self) -> bool:
        return any(slot.is_in_open_graph() for slot in self.slots if isinstance(slot, ParamHandle))

    def update_to_come(self) -> bool:
        units = [slot.unit for slot in self.slots[:1] if isinstance(slot, ParamHandle)]
        return any(unit is not None and (unit.pending is not None or unit.awaits_step) for unit in units)

    def changed(self) -> bool:
        if not self.installed:
            return False
        changed = [slot.changed() for slot in self.slots if isinstance(slot, ParamHandle)]  # each has to look
        return any(changed)

    def before_gather(self) -> None:
        for slot in self.slots[:1]:
            if isinstance(slot, ParamHandle) and slot.block is not None:
                self.pager.catch_up(slot.unit)
                self.memory.settle(slot.block)

    def rewritten(self) -> None:
        for slot in self.slots:
            if isinstance(slot, ParamHandle):
                slot.rewritten()

    def edits(self) -> int:
        return sum(slot.edits for slot in self.slots if isinstance(slot, ParamHandle))

    def can_release(self) -> bool:
        return super().can_release() and not any(
            slot.displaced() for slot in self.slots if isinstance(slot, ParamHandle) and slot.is_to_be_updated()
        )


class Unit:
    """Parameters that move together. ``handles`` are in registration order.

    Attributes:
        gradients: of the parameters that were trainable when the unit was made; None where all were frozen.
        late_gradients: of each parameter that was unfrozen later; with several ranks one block of all frozen ones.
        layout: how the weights are cut for several ranks, tensor by tensor in the order of ``handles``; None with one.
        gradient_layout: the same of ``gradients``, whose tensors are the ``handles`` that were trainable, in fp32.
        rank: this one, 0 where nothing is cut.
        pending: the optimizer step that it still has to make before anybody uses it. See [Note: deferred updates] in
            ``params.pager``.
        awaits_step: all its gradients have come, so nobody uses it before the step, as far as that is known.
    """

    def __init__(
        self,
        index: int,
        name: str,
        handles: list[ParamHandle],
        weights: Block,
        owner: BlockView,
        layout: ShardLayout | None = None,
        rank: int = 0,
    ) -> None:
        self.index = index
        self.name = name
        self.handles = handles
        self.weights = weights
        self.owner = owner
        self.layout = layout
        self.gradient_layout: ShardLayout | None = None
        self.rank = rank
        self.gradients: Block | None = None
        self.late_gradients: list[Block] = []
        self.pieces: list[StatePiece] = []
        self.pending: PendingUpdate | None = None
        self.awaits_step = False

    @property
    def state(self) -> UnitState:
        if self.owner.installed:
            return UnitState.RESIDENT
        return UnitState.FETCHING if self.weights.state is BlockState.READING else UnitState.EVICTED

    @property
    def is_guessed(self) -> bool:
        """Whether its last update was made before the step was asked for."""
        return self.pending is not None and self.pending.is_guess

    def own_runs(self, handles: Sequence[ParamHandle]) -> list[TensorRun]:
        """The elements of some of its parameters that this rank owns: all with one rank. A run's tensor is the number
        among ``handles``."""
        if self.layout is None:
            return whole_tensors([handle.numel for handle in handles])
        numbers = {handle: number for number, handle in enumerate(self.handles)}
        runs = [self.layout.run_of(self.rank, numbers[handle]) for handle in handles]
        return [TensorRun(index, run.start, run.numel) for index, run in enumerate(runs) if run is not None]

    def blocks(self) -> list[Block]:
        """All of its blocks: weights, gradients, pieces of state."""
        gradients = [] if self.gradients is None else [self.gradients]
        return [self.weights, *gradients, *self.late_gradients, *(piece.block for piece in self.pieces)]

    def __repr__(self) -> str:
        return f"<Unit {self.index} {self.name} {len(self.handles)} parameters {self.state.name}>"
