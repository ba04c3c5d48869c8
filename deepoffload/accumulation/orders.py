"""In which order micro-batches are run, and why."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from torch import nn

from deepoffload.accumulation.asked import choose
from deepoffload.config import AccumulationOrder
from deepoffload.errors import UnsupportedError
from deepoffload.params.kept_attributes import KeptAttributes
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
    configured = AccumulationOrder.AUTO if engine is None else engine.config.accumulation_order
    order = choose(AccumulationOrder, "order", asked, configured)
    if order is AccumulationOrder.HORIZONTAL:
        return None
    known = None if engine is None else engine.pager.order.attributes
    if known is not None and not known.is_of(model):
        known = None
    why_not = "it is not paged" if engine is None else _unavailable(engine, model)
    if known is not None and known.weight:
        why_not = _exchanged(known.weight)
    if why_not is not None:
        if order is AccumulationOrder.VERTICAL and engine is not None:
            raise _refusal(why_not)
        _say(f"accumulation of {type(model).__name__} {ONE_BY_ONE}: {why_not}")
        return None
    if order is AccumulationOrder.VERTICAL or count == 1:
        return TogetherOrder(asked=True) if count > 1 else None
    placement = None if engine is None else engine.placement
    if engine is None or placement is None:  # inside the context: there are no windows yet
        return None
    if known is not None and known.first:
        _say(_left(model, known.first))
        return None
    found = faster_order(placement, count, on_device=engine.pager.memory.device.type != "cpu")
    how = "takes all micro-batches through each unit together" if found.is_vertical else ONE_BY_ONE
    _say(f"accumulation of {type(model).__name__} {how}: {found.why}")
    return TogetherOrder(asked=False) if found.is_vertical else None


def runs_one_by_one(model: nn.Module, attributes: KeptAttributes, *, asked: bool) -> bool:
    """Whether the other micro-batches come one after the other, now that the first forward of all has shown which
    attributes it changes: one unit may set what another one reads.

    Args:
        asked: the program wants the vertical order: it keeps it, and is warned.

    Raises:
        UnsupportedError: the vertical order is asked for, and the forward exchanges weights or writes to them.
    """
    name = attributes.forward_has_ended()
    if attributes.weight or attributes.edited:
        why_not = _exchanged(attributes.weight) if attributes.weight else _written(attributes.edited)
        if asked:
            raise _refusal(why_not)
        _say(f"accumulation of {type(model).__name__} {ONE_BY_ONE}: {why_not}")
        return True
    if not name:
        return False
    if not asked:
        _say(_left(model, name))
        return True
    log.warning(
        "accumulation of %s: its forward sets the attribute %s, which another unit may read. In vertical order it "
        'would see that of another micro-batch: use order="horizontal" then',
        type(model).__name__,
        name,
    )
    return False


def _refusal(why: str) -> UnsupportedError:
    return UnsupportedError(f'accumulation_order = "vertical" is not available: {why}; use "horizontal"')


def _exchanged(weight: str) -> str:
    return f"its forward changes requires_grad of {weight}, or puts another tensor in its place"


def _written(weight: str) -> str:
    return f"its forward writes to the weight {weight}, and backward would see what the last micro-batch has written"


def _left(model: nn.Module, name: str) -> str:
    what = f"its forward sets the attribute {name}, which another unit may read"
    return f"accumulation of {type(model).__name__} {ONE_BY_ONE}: {what}"


def _unavailable(engine: Engine, model: nn.Module) -> str | None:
    """Why this model cannot be run in vertical order, if so."""
    if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
        return "torch.compile has the whole model, and micro-batches stop between its layers: compile the layers"
    if find_spec("greenlet") is None:
        return "forwards stop with the package greenlet, which is not installed (pip install greenlet)"
    return None


@cache
def _say(line: str) -> None:
    """Once in a process."""
    announce(line)
