"""The gradient of one parameter: who holds it, where it lies in its unit's block, and what is known of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from deepoffload.errors import UsageError
from deepoffload.memory.block import Block
from deepoffload.params.ports import PagerPort
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import count_change, outside_user_modes, version_of
from deepoffload.params.unit import BlockView, ParamHandle, Unit
from deepoffload.schedule.block_state import BlockState

if TYPE_CHECKING:
    import torch


class GradientState(enum.Enum):
    """Who holds the gradient of one parameter."""

    EMPTY = "nobody"
    LANDED = "the unit's gradient block"
    HANDED_OVER = "the unit's gradient block, for an update that is still to come; the program sees none any more"
    USER = "a tensor in .grad that the program assigned, or that autograd made and keeps"

    __hash__ = object.__hash__  # members are one of a kind; Enum's own is a Python call, and every landing asks


_TRANSITIONS: dict[GradientState, frozenset[GradientState]] = {
    GradientState.EMPTY: frozenset({GradientState.LANDED, GradientState.USER}),
    GradientState.LANDED: frozenset({GradientState.LANDED, GradientState.HANDED_OVER, GradientState.EMPTY}),
    GradientState.HANDED_OVER: frozenset({GradientState.EMPTY}),
    GradientState.USER: frozenset({GradientState.EMPTY}),
}

IN_BLOCK = (GradientState.LANDED, GradientState.HANDED_OVER)


class GradientRecord:
    """What :class:`~deepoffload.optim.gradients.Gradients` knows of one parameter's gradient. Nobody else writes it.

    There is one method for each transition of ``state``. Any other transition is a fault in deepoffload itself.

    Attributes:
        slot: where the gradient lands; None for a parameter that is not trained, or whose element type does not land.
        sum_sq: sum of squares of a landed gradient, as :func:`~deepoffload.native.cpu_adam.land` gives it; None while
            it is unknown.
        non_finite: whether the landed gradient holds an infinity or NaN; meaningful where ``sum_sq`` is known.
        hook: tells us when autograd has completed the gradient; None while the parameter is not tracked.
        changed_at: the count of :attr:`Gradients.changes` when a gradient last landed or was assigned.
        light: so small that it may stay autograd's own where nothing is moved.
    """

    __slots__ = ("handle", "state", "slot", "sum_sq", "non_finite", "hook", "changed_at", "light", "_sums_lost")

    def __init__(self, handle: ParamHandle) -> None:
        self.handle = handle
        self.state = GradientState.EMPTY
        self.slot: GradientSlot | None = None
        self.sum_sq: int | None = None
        self.non_finite = False
        self.hook: RemovableHandle | None = None
        self.changed_at = 0
        self.light = False
        self._sums_lost = 0

    # -- transitions (each checks the table itself: a landing pays for every call) -----------------------------------

    def landed(self, sums: tuple[int, bool] | None) -> None:
        """Autograd's gradient is in the block: the first one, or one that was added to what is there.

        Args:
            sums: sum of squares, and whether a value is not finite; None while pieces come from a device, which call
                :meth:`measured` when the last one has landed.
        """
        if GradientState.LANDED not in _TRANSITIONS[self.state]:
            raise self._refusal(GradientState.LANDED)
        self.state = GradientState.LANDED
        if sums is not None:
            self.sum_sq, self.non_finite = sums

    def left_to_program(self) -> None:
        """``.grad`` holds a tensor that is right, the program's own or autograd's."""
        if GradientState.USER not in _TRANSITIONS[self.state]:
            raise self._refusal(GradientState.USER)
        self.state = GradientState.USER

    def handed_over(self) -> None:
        """The program has dropped a landed gradient that an update still needs."""
        if GradientState.HANDED_OVER not in _TRANSITIONS[self.state]:
            raise self._refusal(GradientState.HANDED_OVER)
        self.state = GradientState.HANDED_OVER

    def dropped(self) -> None:
        """Nobody needs the gradient any more."""
        if GradientState.EMPTY not in _TRANSITIONS[self.state]:
            raise self._refusal(GradientState.EMPTY)
        self.state = GradientState.EMPTY
        self.sum_sq, self.non_finite = None, False

    def _refusal(self, state: GradientState) -> RuntimeError:
        return RuntimeError(f"gradient of {self.handle.name}: no transition from {self.state.name} to {state.name}")

    # -- what is known of a landed gradient --------------------------------------------------------------------------

    def measured(self, sum_sq: int, non_finite: bool) -> None:
        """The landed gradient has this sum of squares."""
        self.sum_sq, self.non_finite = sum_sq, non_finite

    def forget_sum(self) -> None:
        """The landed gradient changes: its sum of squares is taken again when it is needed."""
        self.sum_sq = None
        self._sums_lost += 1

    def measured_later(self) -> Callable[[int, bool], None]:
        """As :meth:`measured`, of a landing that begins now. Where another one has begun before it is over, its sum is
        not that of the gradient, and is left out."""
        number = self._sums_lost

        def measured(sum_sq: int, non_finite: bool) -> None:
            if number == self._sums_lost:
                self.measured(sum_sq, non_finite)

        return measured


class GradientSlot(TensorSlot):
    """The gradient of one parameter in its unit's gradient block.

    ``shown`` is the object behind ``param.grad`` while the program may look at it; made when first asked for.
    """

    __slots__ = ("record", "handle", "version", "shown", "escaped")

    def __init__(self, record: GradientRecord, dtype: torch.dtype) -> None:
        handle = record.handle
        device = handle.pager.memory.device
        super().__init__(handle.pager, f"{handle.name}.grad", None, handle.shape, dtype, handle.stride, device)
        self.record = record
        self.handle = handle
        self.version = 0
        self.shown: Tensor | None = None
        self.escaped = False

    @property
    def unit(self) -> Unit | None:
        return self.handle.unit

    def show(self, tensor: Tensor) -> None:
        """Show the gradient through ``tensor`` from now on."""
        self.shown = tensor
        self.attach(tensor)
        with outside_user_modes():
            self.uninstall()
        self.version = version_of(tensor)
        owner = self.block.owner if self.block is not None else None
        if isinstance(owner, BlockView) and owner.installed:
            owner.installed = False
            owner.install()

    def hide(self) -> None:
        """Stop showing it. Views that the program took of it keep the memory until they are gone."""
        owner = self.block.owner if self.block is not None else None
        if isinstance(owner, BlockView) and self.aliased():
            owner.retired.append(self.alias())
        self.pager.forget_storage(self)
        self.uninstall()
        self._tensor_ref = None  # the program may keep the object, which is none of ours any more
        self.shown = None

    def written(self) -> bool:
        """True when the program may have written to it since the last look; its sum of squares then is unknown."""
        if self.shown is None or self.storage is None:
            return False
        version = version_of(self.shown)
        if version == self.version and not self.escaped:
            return False
        self.version = version
        self.escaped = self.aliased()
        self.taken()
        return True

    def added_to(self) -> None:
        """More has landed: graphs that have kept the gradient no longer hold, as where autograd adds in place."""
        if self.shown is not None:
            count_change(self.shown)
            self.version += 1

    def taken(self) -> None:
        """The program may have changed the gradient."""
        self.record.forget_sum()


class GradientOwner(BlockView):
    """Owner of a gradient block: knows which gradients it holds, and when the program wrote to a shown one through a
    view of it.

    Attributes:
        lands: with several ranks, what lands that has been reduced before the ranks gather the block.
    """

    def __init__(self, pager: PagerPort) -> None:
        super().__init__(pager)
        self.records: list[GradientRecord] = []
        self.lands: Callable[[], None] | None = None

    def before_gather(self) -> None:
        """All ranks are about to gather the block: what has been reduced lands, and what the program wrote to a copy
        goes back to the shard.

        Raises:
            UsageError: the program of this rank has dropped the gradients. [Note: dropped gradients]
        """
        if self.lands is not None:
            self.lands()
        for slot in self.slots[:1]:
            if slot.block is not None:
                self.pager.memory.settle(slot.block)
                if slot.block.state is BlockState.EMPTY:
                    raise UsageError(
                        f"{slot.name} is read on another rank, and the program of this one has dropped it already "
                        "(zero_grad): read it on all ranks, or before the optimizer's step() on one"
                    )

    def add(self, slot: GradientSlot) -> None:
        """The block holds this gradient, too."""
        self.slots.append(slot)
        self.records.append(slot.record)

    def holds_any(self) -> bool:
        """Whether one of its gradients is in the block."""
        for record in reversed(self.records):  # gradients are dropped from the first on: the last is there
            if record.state in IN_BLOCK:
                return True
        return False

    def changed(self) -> bool:
        changed = [slot.written() for slot in self.slots if isinstance(slot, GradientSlot)]  # each has to look
        return any(changed)


def slot_of(record: GradientRecord) -> GradientSlot:
    """Where a gradient lands; it must have a place."""
    if record.slot is None:
        raise RuntimeError(f"{record.handle.name} has no gradient slot")
    return record.slot


def place_of(slot: GradientSlot) -> tuple[Block, GradientOwner]:
    """The block of a gradient, and what owns it."""
    block = slot.block
    if block is None or not isinstance(block.owner, GradientOwner):
        raise RuntimeError(f"{slot.name} has no block")
    return block, block.owner
