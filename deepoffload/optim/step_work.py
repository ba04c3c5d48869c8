"""What one step of an optimizer has to do: which parameters have a gradient, and what their update is."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from deepoffload.optim import checks
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.held_state import HeldState
from deepoffload.optim.ordinary import check_ordinary
from deepoffload.optim.rule import Hyper, Rule, UpdateJob
from deepoffload.optim.update import check_paged
from deepoffload.params.unit import ParamHandle

Group = dict[str, Any]


class WorkingOptimizer(Protocol):
    """What is asked of an optimizer for this (implemented by :class:`deepoffload.optim.base.HostOptimizer`)."""

    rule: ClassVar[Rule]
    state: Any
    param_groups: list[Group]

    def _check_settings(self, group: Mapping[str, Any]) -> None: ...

    def _arrays_of(self, param: Tensor, group: Mapping[str, Any]) -> Mapping[str, str]: ...

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> Hyper: ...

    def _initial(self, group: Mapping[str, Any]) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class StepWork:
    """Every parameter that has a gradient, checked."""

    paged: dict[ParamHandle, tuple[Tensor, UpdateJob]]
    ordinary: list[tuple[Tensor, UpdateJob]]


def find_work(optimizer: WorkingOptimizer, held: HeldState, only: Set[ParamHandle] | None = None) -> StepWork:
    """Everything that has a gradient, or what of the paged parameters in ``only`` has.

    Args:
        held: of which parameters the pieces hold this optimizer's state.

    Raises:
        As :meth:`~deepoffload.optim.base.HostOptimizer.step`, before anything is changed.
    """
    work = StepWork({}, [])
    for group in optimizer.param_groups:
        jobs: dict[_JobKey, UpdateJob] = {}
        for param in group["params"]:
            handle = handle_of(param)
            if only is not None and handle not in only:
                continue
            if handle is not None:
                if gradients_of(handle.pager, handle.name).present(handle):
                    check_paged(handle, optimizer.rule.name)
                    held.refuse_lost(handle)
                    job = _job(optimizer, param, group, jobs, held=handle in held)
                    work.paged[handle] = (param, job)
            elif param.grad is not None:
                check_ordinary(param, optimizer.rule.name, group.get("state_dtype", "fp32"))
                work.ordinary.append((param, _job(optimizer, param, group, jobs, held=None)))
    return work


_JobKey = tuple[int, bool, tuple[str, ...]]
"""What tells the updates of one group's parameters apart: the step's number, whether it is the first, arrays."""


def _job(
    optimizer: WorkingOptimizer, param: Tensor, group: Group, jobs: dict[_JobKey, UpdateJob], held: bool | None
) -> UpdateJob:
    """The update of one parameter.

    Args:
        jobs: those of the group so far.
        held: whether pieces hold its state; None for an ordinary parameter.
    """
    state, rule = optimizer.state.get(param), optimizer.rule
    arrays = optimizer._arrays_of(param, group)
    if held is not None:
        first = not held and not (rule.foreign and state)
    else:
        first = not state or not (rule.foreign or any(key in state for key in arrays))
    step = int(state.get("step", 0)) + 1 if state and not rule.foreign else 1
    key = step, first, tuple(arrays)
    job = jobs.get(key)
    if job is None:
        optimizer._check_settings(group)
        hyper, masters = optimizer._hyper(group, step, first), bool(group.get("master_weights", True))
        checks.finite(hyper)
        job = UpdateJob(step, hyper, arrays, optimizer._initial(group), first, masters, rule.foreign)
        jobs[key] = job
    return job
