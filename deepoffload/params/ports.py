"""What slots, units and doors ask of the pager, and the pager of the gradients: seams, so that imports go one way.

The slots that pass through here are typed ``Any``: their classes lie above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.memory.block import Block
from deepoffload.memory.lock import BooksLock
from deepoffload.memory.tier_manager import TierManager

if TYPE_CHECKING:
    from deepoffload.params.open_graphs import OpenGraphs


class GradientDoor(Protocol):
    """What stands behind ``param.grad`` (implemented by :class:`deepoffload.optim.gradients.Gradients`)."""

    def read(self, handle: Any) -> Tensor | None:
        """The gradient that ``param.grad`` shows."""

    def assign(self, handle: Any, value: Tensor | None) -> None:
        """``param.grad = value``; None drops it."""

    def track(self, handle: Any) -> None:
        """From now on take over what autograd puts into ``param.grad``."""

    def is_tracked(self, handle: Any) -> bool:
        """Whether that is so already."""

    def forget(self, unit: Any) -> None:
        """The unit is gone."""


class PagerPort(Protocol):
    """The pager as its slots see it (implemented by :class:`deepoffload.params.pager.Pager`)."""

    tiers: TierManager
    memory: ShownMemory
    lock: BooksLock
    storages: dict[int, Any]
    units: list[Any]
    gradients: GradientDoor | None
    adopt_late: Callable[[Tensor, str], Any] | None
    closed_because: str | None
    evict_always: bool
    graphs: OpenGraphs
    engine: Any
    mapped_copies: Any

    def memory_of(self, block: Block | None) -> ShownMemory: ...

    def parameter_registered(self) -> None: ...

    def parameter_dropped(self, _: Any) -> None: ...

    def remember_storage(self, slot: Any) -> None: ...

    def forget_storage(self, slot: Any) -> None: ...

    def pin(self, slot: Any) -> None: ...

    def unpin(self, slot: Any) -> None: ...

    def pin_for_backward(self, handle: Any) -> None: ...

    def will_change(self, slot: Any) -> None: ...

    def catch_up(self, unit: Any) -> None: ...

    def hold_until_step(self, slot: Any) -> None: ...

    def note_use(self, slot: Any) -> None: ...

    def opened(self) -> list[Any]: ...

    def push_hooks(self, *, always: bool = False) -> bool | None: ...

    def pop_hooks(self) -> None: ...

    def pump(self) -> None: ...

    def refuse_closed(self, name: str) -> None: ...
