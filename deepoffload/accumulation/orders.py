"""In which order micro-batches are run, and why."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

from torch import nn

from deepoffload.accumulation.kept_attributes import KeptAttributes
from deepoffload.config import AccumulationOrder
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.runtime.announce import announce
from deepoffload.runtime.engine import Engine
from deepoffload.schedule.accumulation_order import faster_order

log = logging.getLogger("deepoffload")

ONE_BY_ONE = "runs one micro-batch after the other"


class TogetherOrder(NamedTuple):
    """All micro-batches go through one unit before any goes on to the next. ``asked``: since the program says so."""

    asked: bool


def vertical_order(engine: Engine | None, model: nn.Module, asked: str | None, count: int) -> TogetherOrder | None:
    """Whether micro-batches go through the units together; None: one after the other. Says once why.

    Args:
        engine: None where the model is not paged.
        count: of the micro-batches.
        asked: of this call; None: what the configuration says.

    Raises:
        UsageError: there is no such order. UnsupportedError: the vertical order is asked for and not available here.
    """
    order = _order(engine, asked)
    if order is AccumulationOrder.HORIZONTAL:
        return None
    why_not = "it is not paged" if engine is None else _unavailable(engine, model)
    if why_not is not None:
        if order is AccumulationOrder.VERTICAL and engine is not None:
            raise UnsupportedError(f'accumulation_order = "vertical" is not available: {why_not}; use "horizontal"')
        _say(f"accumulation of {type(model).__name__} {ONE_BY_ONE}: {why_not}")
        return None
    if order is AccumulationOrder.VERTICAL or count == 1:
        return TogetherOrder(asked=True) if count > 1 else None
    placement = None if engine is None else engine.placement
    if engine is None or placement is None:  # inside the context: there are no windows yet
        return None
    if engine.pager.order.attribute_set:
        return None
    found = faster_order(placement, count)
    how = "takes all micro-batches through each unit together" if found.is_vertical else ONE_BY_ONE
    _say(f"accumulation of {type(model).__name__} {how}: {found.why}")
    return TogetherOrder(asked=False) if found.is_vertical else None


class AttributeWatch:
    """Sees whether the forward of the first micro-batch of all leaves an attribute of a module another one.

    Args:
        asked: the program wants the vertical order: it keeps it, and is warned.
    """

    def __init__(self, engine: Engine, model: nn.Module, *, asked: bool) -> None:
        self._order = engine.pager.order
        self._name = type(model).__name__
        self._asked = asked
        self._attributes = KeptAttributes(model)

    def first_has_ended(self) -> bool:
        """Whether the other micro-batches come one after the other."""
        name = self._attributes.changed()
        self._order.attribute_set = name or ""
        if name is None:
            return False
        what = f"its forward sets the attribute {name}, which another unit may read"
        if self._asked:
            log.warning(
                '%s: %s. In vertical order it would see that of another micro-batch: use order="horizontal" then',
                f"accumulation of {self._name}",
                what,
            )
        else:
            _say(f"accumulation of {self._name} {ONE_BY_ONE}: {what}")
        return not self._asked


def _order(engine: Engine | None, asked: str | None) -> AccumulationOrder:
    if asked is None:
        return AccumulationOrder.AUTO if engine is None else engine.config.accumulation_order
    try:
        return AccumulationOrder(asked)
    except ValueError:
        known = ", ".join(repr(member.value) for member in AccumulationOrder)
        raise UsageError(f"accumulate(order={asked!r}): there are {known}") from None


def _unavailable(engine: Engine, model: nn.Module) -> str | None:
    """Why this model cannot be run in vertical order, if so."""
    device = engine.pager.memory.device
    if engine.link is not None:
        return f"{engine.ranks.world_size} ranks train it together"
    if device.type != "cpu":
        return f"{device} runs all backwards in one thread of its own"
    if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
        return "torch.compile has the whole model, and micro-batches stop between its layers: compile the layers"
    return None


@cache
def _say(line: str) -> None:
    """Once in a process."""
    announce(line)
