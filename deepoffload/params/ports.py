"""Protocols that let imports go one way.

Slots, units and doors see the pager through :class:`PagerPort`. The pager sees the gradients through
:class:`GradientDoor`, and the engine through :class:`PagerOwner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from deepoffload.copies.shown import ShownMemory
from deepoffload.memory.block import Block
from deepoffload.memory.lock import BooksLock
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.held import HeldUntilStep
from deepoffload.ranks.edited import Edited
from deepoffload.ranks.exchange import TransferSizes
from deepoffload.ranks.joint_task import JointTasks
from deepoffload.ranks.notices import Notices
from deepoffload.ranks.places import RankMap
from deepoffload.schedule.cost_model import LinkRates

if TYPE_CHECKING:
    from deepoffload.params.hook_stack import HookStack
    from deepoffload.params.lifetime import Lifetime
    from deepoffload.params.mapped import MappedCopies
    from deepoffload.params.open_graphs import OpenGraphs
    from deepoffload.params.slot import TensorSlot
    from deepoffload.params.unit import ParamHandle, Unit
    from deepoffload.params.use_order import UseOrder
    from deepoffload.params.window import Window


class GradientDoor(Protocol):
    """What stands behind ``param.grad`` (implemented by :class:`deepoffload.optim.gradients.Gradients`)."""

    def read(self, handle: ParamHandle) -> Tensor | None:
        """The gradient that ``param.grad`` shows."""

    def assign(self, handle: ParamHandle, value: Tensor | None) -> None:
        """``param.grad = value``; None drops it."""

    def track(self, handle: ParamHandle) -> None:
        """From now on take over what autograd puts into ``param.grad``."""

    def is_tracked(self, handle: ParamHandle) -> bool:
        """Whether that is so already."""

    def forget(self, unit: Unit) -> None:
        """The unit is gone."""

    def land(self, param: Tensor, handle: ParamHandle) -> None:
        """Take over what autograd has put into ``param.grad``."""

    def is_users(self, handle: ParamHandle) -> bool:
        """Whether the gradient is a tensor of the program, into which autograd adds."""


class PagerOwner(Protocol):
    """Whose models a pager pages (implemented by :class:`deepoffload.runtime.engine.Engine`)."""

    @property
    def gradients(self) -> GradientDoor: ...

    def adopt_late(self, param: Tensor, name: str) -> ParamHandle | None:
        """Page a parameter that no registration hook has seen; None when that cannot be done."""

    def adopt_newcomers(self) -> None:
        """Page what has come to the models since they were last called."""

    def all_dead(self) -> None:
        """The last parameter is gone."""


class CommitPort(Protocol):
    """What makes steps durable (implemented by :class:`deepoffload.runtime.durability.Durability`)."""

    def pump(self) -> None:
        """Write what stays in memory, as the pager writes the rest."""

    def before_step(self) -> None:
        """The next step is about to change something: make the last one durable first.

        Raises:
            IoFailure: the disk failed. BudgetError: there is no room. Nothing has been changed.
        """


class PlanningPort(Protocol):
    """What plans ask of the ranks that train one model."""

    @property
    def ranks(self) -> RankMap:
        """Who they are."""

    @property
    def exchange(self) -> TransferSizes | None:
        """What a transfer between them takes; None where nothing is moved."""

    @property
    def rates(self) -> LinkRates | None:
        """What one gets from the others; None where nobody has measured it."""


class RankPort(PlanningPort, Protocol):
    """What joins this rank with the others that train the same model."""

    @property
    def on_forward(self) -> Callable[[Sequence[int]], None]:
        """To be called when the program enters the forward of units, by number, also in a backward."""

    @property
    def notices(self) -> Notices:
        """Notices to the others."""

    @property
    def tasks(self) -> JointTasks:
        """What all of them do together outside of rounds."""

    @property
    def is_held(self) -> bool:
        """Whether no other rank may be served now."""

    def hold(self) -> AbstractContextManager[None]:
        """While this lasts no other rank is served."""

    def meet_edit(self, number: int, edited: Edited) -> None:
        """Wait until all ranks are about to change what their programs see of a tensor, or have done so."""


class ActivationRegion(Protocol):
    """What is done with the activations of one call of a module, from its begin on."""

    def close(self) -> None:
        """The call is over."""


class TurnPort(Protocol):
    """Micro-batches of one call of ``accumulate``, which may take turns (implemented by
    :class:`deepoffload.accumulation.turns.Turns`)."""

    def number(self) -> int | None:
        """Which of them runs while others are in the middle of their forwards; None else."""

    def enter(self, window: Window, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The window of a module is about to open: let others go first. Returns other arguments for the call."""

    def region(self, window: Window, module: nn.Module, args: Any, kwargs: Any) -> ActivationRegion | None:
        """The window opens in a forward with gradients. None: autograd keeps the activations as ever."""

    def leave(self, window: Window, output: object) -> None:
        """The call of a window's module is over."""

    def land(self, param: Tensor, handle: ParamHandle, gradients: GradientDoor) -> None:
        """A gradient is complete, and lands."""


class PagerPort(Protocol):
    """The pager as its slots see it (implemented by :class:`deepoffload.params.pager.Pager`)."""

    tiers: TierManager
    memory: ShownMemory
    link: RankPort | None
    inference: bool
    partial: set[int]
    routed: set[int]
    lock: BooksLock
    storages: dict[int, TensorSlot]
    units: list[Unit]
    gradients: GradientDoor | None
    evict_always: bool
    graphs: OpenGraphs
    hooks: HookStack
    life: Lifetime
    engine: PagerOwner | None
    mapped_copies: MappedCopies
    held: HeldUntilStep
    order: UseOrder

    def memory_of(self, block: Block | None) -> ShownMemory: ...

    def remember_storage(self, slot: TensorSlot) -> None: ...

    def forget_storage(self, slot: TensorSlot) -> None: ...

    def pin(self, slot: TensorSlot, together: Sequence[TensorSlot] = ()) -> None: ...

    def unpin(self, slot: TensorSlot) -> None: ...

    def pin_for_backward(self, handle: ParamHandle) -> None: ...

    def will_change(self, slot: TensorSlot) -> None: ...

    def catch_up(self, unit: Unit | None) -> None: ...

    def hold_until_step(self, slot: TensorSlot) -> None: ...

    def note_use(self, slot: TensorSlot) -> None: ...

    def adopt_late(self, param: Tensor, name: str) -> ParamHandle | None: ...

    def pump(self) -> None: ...
