"""In which order micro-batches are run, and why."""

from __future__ import annotations

from functools import cache

from torch import nn

from deepoffload.config import AccumulationOrder
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.runtime.announce import announce
from deepoffload.runtime.engine import Engine
from deepoffload.schedule.accumulation_order import faster_order

ONE_BY_ONE = "runs one micro-batch after the other"


def is_vertical(engine: Engine | None, model: nn.Module, asked: str | None, count: int) -> bool:
    """Whether all micro-batches go through one unit before any goes on to the next. Says once why.

    Args:
        engine: None where the model is not paged.
        count: of the micro-batches.
        asked: of this call; None: what the configuration says.

    Raises:
        UsageError: there is no such order. UnsupportedError: the vertical order is asked for and not available here.
    """
    order = _order(engine, asked)
    if order is AccumulationOrder.HORIZONTAL:
        return False
    why_not = "it is not paged" if engine is None else _unavailable(engine, model)
    if why_not is not None:
        if order is AccumulationOrder.VERTICAL and engine is not None:
            raise UnsupportedError(f'accumulation_order = "vertical" is not available: {why_not}; use "horizontal"')
        _say(f"accumulation of {type(model).__name__} {ONE_BY_ONE}: {why_not}")
        return False
    if order is AccumulationOrder.VERTICAL or count == 1:
        return count > 1
    placement = None if engine is None else engine.placement
    if placement is None:  # inside the context: there are no windows yet
        return False
    found = faster_order(placement, count)
    how = "takes all micro-batches through each unit together" if found.is_vertical else ONE_BY_ONE
    _say(f"accumulation of {type(model).__name__} {how}: {found.why}")
    return found.is_vertical


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
