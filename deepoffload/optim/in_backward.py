"""Updates inside backward (``step_overlap="in_backward"``): a unit is updated as soon as its last gradient has landed.

Gradients then wait for nothing and take no memory beyond their unit's. The price: what must see all gradients first
(clipping, skipping a step, a second backward into the same step) is refused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.unit_completion import UnitCompletion
from deepoffload.params.unit import ParamHandle, Unit

log = logging.getLogger("deepoffload")

PagedWork = dict[ParamHandle, tuple[Tensor, UpdateJob]]
"""Parameters with what an update does to them."""


class EarlyOptimizer(Protocol):
    """What an optimizer offers for this (implemented by :class:`deepoffload.optim.base.HostOptimizer`)."""

    def update_early(self, handles: list[ParamHandle], *, wait: bool) -> None:
        """Make the step of these parameters, which belong to one unit, from the gradients that have landed; ``wait``:
        decide on it only, it is made when the pager is asked to catch up."""


class EarlyUpdates:
    """Which parameters of one pager are updated in this backward already.

    Args:
        on_device: gradients take a while to come. A unit's step is decided on when its last one is on its way, and made
            when that has landed and a later unit's gradients come: to wait for it would keep the device waiting, too.

    Attributes:
        paused: set while gradients only accumulate (micro-batches before the last).
        decided: units whose step is decided on and not made yet, the oldest first.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.paused = False
        self.decided: deque[Unit] = deque()
        self._on_device = on_device
        self._completion = UnitCompletion(self._is_updated)
        self._used: set[ParamHandle] = set()

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
        """A gradient has landed; if it was its unit's last one, the unit is updated now."""
        owned = {} if self.paused else self._completed_by(handle)
        wait = self._on_device and len(owned) == 1
        for optimizer, handles in owned.items():
            self._used.update(handles)
            optimizer.update_early(handles, wait=wait)
        if wait and handle.unit is not None:
            self.decided.append(handle.unit)

    def _completed_by(self, handle: ParamHandle) -> dict[EarlyOptimizer, list[ParamHandle]]:
        """The parameters of a unit, by the optimizer that updates them, when this gradient was the last of them."""
        owned: dict[EarlyOptimizer, list[ParamHandle]] = {}
        for other in self._completion.landed(handle):
            optimizer = _owner(other)
            if optimizer is not None:
                owned.setdefault(optimizer, []).append(other)
        return owned

    @staticmethod
    def _is_updated(handle: ParamHandle) -> bool:
        """Whether an optimizer waits for the gradient of this parameter."""
        param = handle.tensor
        return param is not None and param.requires_grad and _owner(handle) is not None

    def end_of_step(self, optimizer: EarlyOptimizer) -> int:
        """The next gradients of what ``optimizer`` updates belong to its next step. Returns how many parameters were
        updated in this one. To be called under the pager's lock: other optimizers may be in their backward."""
        seen = self._used | self._completion.handles
        mine = {handle for handle in seen if _owner(handle) in (optimizer, None)}
        count = len(self._used & mine)
        self._completion.start_step(mine)
        self._used -= mine
        self.decided.clear()
        return count


class InBackward:
    """One optimizer's part: what it refuses, and the settings that its updates inside backward were made with.

    Attributes:
        made: these updates, since the last step.
    """

    def __init__(self) -> None:
        self.made: PagedWork = {}
        self._settings: list[dict[str, Any]] | None = None

    @staticmethod
    def refuse_looking_at_all(max_grad_norm: float | None, skip_non_finite: bool) -> None:
        """Raise UsageError for what needs all gradients at once."""
        if max_grad_norm is not None or skip_non_finite:
            what = "max_grad_norm clips" if max_grad_norm is not None else "skip_non_finite looks at"
            raise UsageError(
                f"{what} all gradients together, and with step_overlap='in_backward' each is used and dropped as soon "
                "as it is there; use step_overlap='deferred'"
            )

    def used(self, groups: Iterable[Mapping[str, Any]], work: PagedWork) -> None:
        """An update is made with the settings that the groups have now."""
        if self._settings is None:
            self._settings = [_settings(group) for group in groups]
        self.made.update(work)

    def end_of_step(self) -> None:
        """A step is over, or there will be none of these updates."""
        self.made, self._settings = {}, None

    def refuse_changed(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise UsageError, in ``step()``, when settings are no longer those that the updates were made with."""
        used, self._settings = self._settings, None
        if used is not None and any(a != _settings(b) for a, b in zip(used, groups, strict=False)):
            raise UsageError(
                "lr or another setting of the optimizer was changed between backward() and step(). With "
                "step_overlap='in_backward' the update was made inside backward(), with the old ones: change settings "
                "before forward (torch's schedules after step() do), or use step_overlap='deferred'"
            )

    def forget(self, optimizer: EarlyOptimizer, early: EarlyUpdates, set_to_none: bool) -> None:
        """``zero_grad()`` of ``optimizer``: what was updated in a backward that no ``step()`` followed stays so, and
        the next backward starts a step. To be called under the pager's lock."""
        if not set_to_none:
            raise UsageError(
                "zero_grad(set_to_none=False): with step_overlap='in_backward' gradients are used and dropped as "
                "soon as they are there, none is left to be filled with zeros; use zero_grad()"
            )
        count = early.end_of_step(optimizer)
        self.end_of_step()
        if count:
            log.warning(
                "zero_grad() before step(): %d parameters were updated inside that backward and stay so "
                "(step_overlap='deferred' would have left them)",
                count,
            )


def _owner(handle: ParamHandle) -> EarlyOptimizer | None:
    """The optimizer that updates ``handle``."""
    found: EarlyOptimizer | None = handle.pager.held.owner(handle)
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
