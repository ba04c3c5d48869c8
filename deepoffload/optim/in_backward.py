"""Updates inside backward (``step_overlap="in_backward"``): a unit makes its step as soon as its last gradient landed.

Gradients then wait for nothing and take no memory beyond their unit's. The price: what must see all gradients first
(clipping, skipping a step, a second backward into the same step) is refused.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from deepoffload.errors import UsageError
from deepoffload.params.unit import ParamHandle


class EarlyOptimizer(Protocol):
    """What an optimizer offers for this (implemented by :class:`deepoffload.optim.base.HostOptimizer`)."""

    def update_early(self, handles: list[ParamHandle]) -> None:
        """Make the step of these parameters, which belong to one unit, from the gradients that have landed."""


class EarlyUpdates:
    """Which parameters of one pager have made their step in this backward already.

    Attributes:
        paused: set while gradients only accumulate (micro-batches before the last).
    """

    def __init__(self) -> None:
        self.paused = False
        self._owners: weakref.WeakKeyDictionary[ParamHandle, weakref.ref[EarlyOptimizer]] = weakref.WeakKeyDictionary()
        self._seen: set[ParamHandle] = set()
        self._used: set[ParamHandle] = set()

    def own(self, handle: ParamHandle, optimizer: EarlyOptimizer) -> None:
        """From now on ``optimizer`` updates ``handle``."""
        self._owners[handle] = weakref.ref(optimizer)

    def is_used(self, handle: ParamHandle) -> bool:
        """Whether the gradient has gone into an update since the last ``step()``."""
        return handle in self._used

    def refuse_more(self, handle: ParamHandle) -> None:
        """Raise UsageError when another gradient arrives after the update was made."""
        if handle in self._used:
            raise UsageError(
                f"{handle.name} was updated in this backward already, and another gradient arrived for it: a second "
                "backward before step(), or reentrant checkpointing. step_overlap='in_backward' cannot know which "
                "gradient is the last one then; use step_overlap='deferred'"
            )

    def landed(self, handle: ParamHandle) -> None:
        """A gradient has landed; if it was its unit's last one, the unit makes its step now."""
        unit = handle.unit
        if self.paused or unit is None or handle not in self._owners:
            return
        self._seen.add(handle)
        owned: dict[EarlyOptimizer, list[ParamHandle]] = {}
        for other in unit.handles:
            reference = self._owners.get(other)
            optimizer = reference() if reference is not None else None
            param = other.tensor
            if optimizer is None or param is None or not param.requires_grad:
                continue
            if other not in self._seen:
                return
            owned.setdefault(optimizer, []).append(other)
        for optimizer, handles in owned.items():
            self._used.update(handles)
            optimizer.update_early(handles)

    def end_of_step(self) -> int:
        """The next gradients belong to the next step. Returns how many parameters were updated in this one."""
        count = len(self._used)
        self._seen.clear()
        self._used.clear()
        return count
