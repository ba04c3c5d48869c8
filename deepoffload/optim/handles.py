"""From a parameter, as an optimizer has it, to the engine that pages it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.in_backward import EarlyUpdates
from deepoffload.optim.speculation.port import SpeculationPort
from deepoffload.params.ports import PagerPort
from deepoffload.params.unit import ParamHandle


def handle_of(param: Tensor) -> ParamHandle | None:
    """The handle of a paged parameter; None for an ordinary one."""
    slot = param.__dict__.get("_slot")
    return slot if isinstance(slot, ParamHandle) else None


def early_of(pager: PagerPort) -> EarlyUpdates | None:
    """The updates inside backward of an engine that makes them there."""
    gradients = pager.gradients
    return gradients.early if isinstance(gradients, Gradients) else None


def speculation_of(pager: PagerPort) -> SpeculationPort | None:
    """The updates on a guess of an engine that makes them."""
    gradients = pager.gradients
    return gradients.speculation if isinstance(gradients, Gradients) else None


def gradients_of(pager: PagerPort, name: str = "") -> Gradients:
    """The gradients of an engine.

    Raises:
        ClosedError, UsageError: its parameters cannot be updated any more, or not yet.
    """
    if pager.life.closed_because is not None:
        pager.life.refuse_closed(name)
    gradients = pager.gradients
    if not isinstance(gradients, Gradients):
        raise UsageError("the optimizer was used inside offload_context; use it after the context has ended")
    return gradients


def adopt_newcomers(groups: Iterable[Mapping[str, Any]]) -> None:
    """Where an optimizer gets parameters that several ranks share, page what has come to their model since its last
    call: the ranks train nothing next to it that is ordinary. All of them make the optimizer, so they meet here."""
    handles = [handle_of(param) for group in groups for param in group["params"]]
    for pager in {id(handle.pager): handle.pager for handle in handles if handle is not None}.values():
        if pager.link is not None and pager.engine is not None and pager.gradients is not None:
            pager.engine.adopt_newcomers()
