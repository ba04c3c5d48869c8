"""Methods of an optimizer that change weights outside of a step: ``train()`` and ``eval()`` of schedule-free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepoffload.memory.block import Block
from deepoffload.optim.checks import STATE_DTYPES
from deepoffload.optim.foreign.maker import settings_of
from deepoffload.optim.foreign.one_step import ForeignHyper
from deepoffload.optim.foreign.update import ForeignUpdate
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.rule import UpdateJob
from deepoffload.params.unit import ParamHandle, Unit

if TYPE_CHECKING:
    from deepoffload.optim.foreign.paged_optimizer import PagedOptimizer


class MethodUpdate(ForeignUpdate):
    """The call of a method that needs no gradients."""

    uses_gradients = False

    def needs(self, handle: ParamHandle) -> bool:
        return False

    def _blocks(self, unit: Unit) -> list[Block]:
        return [unit.weights]


def call_method(optimizer: PagedOptimizer, method: str) -> None:
    """Call a method of the class for each parameter that has state, and bring the settings of the groups to what it
    makes of them. Nothing is pending before it, nor after it."""
    paged: dict[ParamHandle, UpdateJob] = {}
    ordinary: list[tuple[Tensor, dict[str, Any], UpdateJob]] = []
    for number, group in enumerate(optimizer.param_groups):
        dtype = STATE_DTYPES[group.get("state_dtype", "fp32")]
        hyper = ForeignHyper(settings_of(group), {}, dtype, method)
        for param in group["params"]:
            handle, state = handle_of(param), optimizer.state.get(param)
            if handle is not None:
                optimizer._held.refuse_lost(handle)
            if not state and (handle is None or handle not in optimizer._held):
                continue
            job = UpdateJob(1, hyper, optimizer._arrays_of(param, group), {}, False, True, True)
            if handle is None:
                ordinary.append((param, optimizer.state[param], job))
            else:
                paged[handle] = job
        hyper.after.update(optimizer._settings_steps.after(number, group, method))
        group.update(hyper.after)
    optimizer._ordinary.run(ordinary, 1.0)
    for pager in optimizer._pagers():
        if pager.commits is not None:
            pager.commits.before_step()
        jobs = {handle: job for handle, job in paged.items() if handle.pager is pager}
        kept = optimizer._kept(jobs)
        update = MethodUpdate(pager, gradients_of(pager), optimizer.rule, jobs, 1.0, optimizer._maker, *kept)
        update.take_edits()
        with pager.lock:
            update.hand_over()
        update.run(defer=False)
