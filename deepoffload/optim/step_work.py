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

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]: ...

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
        jobs: dict[tuple[int, bool], UpdateJob] = {}
        arrays = optimizer._arrays(group)
        for param in group["params"]:
            handle = handle_of(param)
            if only is not None and handle not in only:
                continue
            if handle is not None:
                if gradients_of(handle.pager, handle.name).present(handle):
                    check_paged(handle, optimizer.rule.name)
                    held.refuse_lost(handle)
                    work.paged[handle] = (param, _job(optimizer, param, group, handle not in held, jobs))
            elif param.grad is not None:
                check_ordinary(param, optimizer.rule.name, group.get("state_dtype", "fp32"))
                state = optimizer.state.get(param)
                first = not state or not any(key in state for key in arrays)
                work.ordinary.append((param, _job(optimizer, param, group, first, jobs)))
    return work


def _job(
    optimizer: WorkingOptimizer, param: Tensor, group: Group, first: bool, jobs: dict[tuple[int, bool], UpdateJob]
) -> UpdateJob:
    """The update of one parameter; ``jobs``: those of the group so far."""
    state = optimizer.state.get(param)
    step = int(state.get("step", 0)) + 1 if state else 1
    job = jobs.get((step, first))
    if job is None:
        optimizer._check_settings(group)
        hyper, masters = optimizer._hyper(group, step, first), bool(group.get("master_weights", True))
        checks.finite(hyper)
        job = UpdateJob(step, hyper, optimizer._arrays(group), optimizer._initial(group), first, masters)
        jobs[step, first] = job
    return job
