"""The step of an optimizer of ordinary parameters, made again without looking everything up anew.

Between two steps of a training loop nothing changes but values, most of the time. A plan keeps what the last step has
found out: where weights and states lie, which layout and settings they have. It is checked against what is there now,
down to the addresses, and dropped at the first difference; the long way then finds out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.native.cpu_adam import Segment, StateDType, StateLayout
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.gradients import NATIVE_DTYPES
from deepoffload.optim.ordinary import layout_of
from deepoffload.optim.rule import SCALE_SUFFIX, Hyper
from deepoffload.optim.state import LEAD_KEYS
from deepoffload.optim.threads import num_threads

_TAIL_FIELDS = Segment._fields[6:]
"""Of a segment: what lies beside gradient and weight."""

_CHANGEABLE = (Tensor, list)
"""Settings that may have other values though they are the same objects."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One array of the state of each parameter in a batch."""

    key: str
    tensors: list[Tensor]
    addresses: list[int]
    numels: list[int]

    def holds(self, states: list[dict[str, Any]]) -> bool:
        key = self.key
        return (
            all(map(is_, [state.get(key) for state in states], self.tensors))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and list(map(Tensor.numel, self.tensors)) == self.numels
        )


@dataclass(slots=True)
class _Batch:
    """Parameters of one layout that had gradients: lists of the same length, for one native call.

    ``columns`` are the arrays of the state, ``tail`` what each segment has behind the weight, field by field."""

    layout: StateLayout
    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    columns: list[_Column] = field(default_factory=list)
    tail: list[list[int]] = field(default_factory=list)
    weight_dtypes: list[int] = field(default_factory=list)

    def segments(self) -> list[Segment] | None:
        """The segments with the gradients of now; None when something else is not where it was."""
        params = self.params
        if not (
            list(map(Tensor.data_ptr, params)) == self.addresses
            and list(map(Tensor.numel, params)) == self.numels
            and [param.dtype for param in params] == self.dtypes
            and all(map(Tensor.is_contiguous, params))
            and all(column.holds(self.states) for column in self.columns)
        ):
            return None
        grads = [param.grad for param in params]
        if not all(grad is not None and grad.layout is torch.strided for grad in grads):
            return None
        present: list[Tensor] = grads  # type: ignore[assignment]
        dtypes = [NATIVE_DTYPES.get(grad.dtype) for grad in present]
        if None in dtypes or not all(map(Tensor.is_contiguous, present)) or any(map(Tensor.is_neg, present)):
            return None
        if list(map(Tensor.numel, present)) != self.numels:
            return None
        addresses = map(Tensor.data_ptr, present)
        rows = zip(
            self.numels, self.jobs, addresses, dtypes, self.addresses, self.weight_dtypes, *self.tail, strict=True
        )
        return list(map(Segment._make, rows))


@dataclass(frozen=True, slots=True)
class _GroupShape:
    """What of a group decides about layouts."""

    params: tuple[Tensor, ...]
    arrays: Mapping[str, str]
    master_weights: bool


class StepPlan:
    """All parameters of an optimizer, each either in a batch, or empty, or without a gradient.

    It belongs to that optimizer, which it does not hold: a deleted optimizer is gone at once.
    """

    def __init__(self, optimizer: RepeatingOptimizer, groups: list[_GroupShape]) -> None:
        self.groups = groups
        self.batches: dict[StateLayout, _Batch] = {}
        self.idle: list[Tensor] = []
        self.empty: list[Tensor] = []
        """Those without elements that have a gradient."""
        self.params = list(optimizer.state)
        self.states = list(optimizer.state.values())
        self.counted: list[dict[str, Any]] = []
        self.steps: list[Tensor] = []
        self.versions: list[int] = []
        """Of ``steps``, as the plan has left them."""
        self.jobs: list[tuple[int, int]] = []
        """Group and number of the last step."""
        self.state_dtypes: list[StateDType] = []
        self.settings: list[list[Any]] = []
        """Of each group, as they were checked."""

    def segments(self, optimizer: RepeatingOptimizer) -> list[tuple[_Batch, list[Segment]]] | None:
        """What the kernel is called with; None when something is not as it was."""
        if not self._holds(optimizer):
            return None
        found = []
        for batch in self.batches.values():
            segments = batch.segments()
            if segments is None:
                return None
            found.append((batch, segments))
        return found

    def _holds(self, optimizer: RepeatingOptimizer) -> bool:
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.groups) or len(state) != len(self.params):
            return False
        for group, shape in zip(groups, self.groups, strict=True):
            params = group["params"]
            if len(params) != len(shape.params) or any(map(is_not, params, shape.params)):
                return False
            if bool(group.get("master_weights", True)) is not shape.master_weights:
                return False
            if any("_slot" in param.__dict__ for param in params) or optimizer._arrays(group) != shape.arrays:
                return False
        return (
            all(map(is_, state, self.params))
            and all(map(is_, state.values(), self.states))
            and all(map(is_, [state.get("step") for state in self.counted], self.steps))
            and [step._version for step in self.steps] == self.versions
            and all(param.grad is None for param in self.idle)
            and all(param.grad is not None and param.numel() == 0 for param in self.empty)
        )

    def hypers(self, optimizer: RepeatingOptimizer) -> list[Hyper] | None:
        """The settings of the next step; None when one changes what states are stored in.

        Raises:
            ValueError: a setting is out of range.
        """
        found = []
        known = [self._known(index, group) for index, group in enumerate(optimizer.param_groups)]
        for (index, step), state_dtype in zip(self.jobs, self.state_dtypes, strict=True):
            group = optimizer.param_groups[index]
            if not known[index]:
                optimizer._check_settings(group)
            hyper = optimizer._hyper(group, step + 1, not self.groups[index].arrays)
            if not known[index]:
                checks.finite(hyper)
            if getattr(hyper, "state_dtype", StateDType.FP32) is not state_dtype:
                return None
            found.append(hyper)
        self.settings = [list(group.values()) for group in optimizer.param_groups]
        return found

    def _known(self, index: int, group: dict[str, Any]) -> bool:
        """Whether the settings are the very values that were checked for the step before, and cannot have changed."""
        values = list(group.values())
        return (
            index < len(self.settings)
            and len(values) == len(self.settings[index])
            and all(map(is_, values, self.settings[index]))
            and not any(isinstance(value, _CHANGEABLE) for value in values if value is not group["params"])
        )

    def count(self) -> None:
        """The step counts."""
        if self.steps:
            torch._foreach_add_(self.steps, 1.0)
            self.versions = [step._version for step in self.steps]
            self.jobs = [(index, step + 1) for index, step in self.jobs]


class RepeatingOptimizer(HostOptimizer):
    """A host optimizer that keeps a plan where all its parameters are ordinary ones."""

    _plan: StepPlan | None

    def _start(self) -> None:
        super()._start()
        self._plan = None

    @torch.no_grad()
    def apply_step(self, *, unscale: float, skip_non_finite: bool, overflow: bool = False) -> bool:
        """As :meth:`HostOptimizer.apply_step`."""
        plan, self._plan = self._plan, None
        segments = plan.segments(self) if plan is not None else None
        hypers = plan.hypers(self) if plan is not None and segments is not None else None
        if plan is None or segments is None or hypers is None:
            applied = super().apply_step(unscale=unscale, skip_non_finite=skip_non_finite, overflow=overflow)
            self._plan = make_plan(self) if applied else None
            return applied
        self._plan = plan
        grad_factor, finite, self.grad_norm = unscale, True, None
        if self.max_grad_norm is not None or skip_non_finite:
            grad_factor, finite = self._grad_factor(self._work(), unscale, skip_non_finite)
        if overflow or (skip_non_finite and not finite):
            return False
        plan.count()
        for batch, batch_segments in segments:
            if batch.layout in LEAD_KEYS:
                for param, state in zip(batch.params, batch.states, strict=True):
                    self._ordinary.follow_weight(param, state)
            self.rule.kernel(batch_segments, hypers, batch.layout, grad_factor=grad_factor, num_threads=num_threads())
            self._ordinary.stepped(batch.params)
        return True


def make_plan(optimizer: RepeatingOptimizer) -> StepPlan | None:
    """What the step that has just been made has found; None where not all parameters are ordinary and contiguous."""
    groups = [
        _GroupShape(tuple(group["params"]), optimizer._arrays(group), bool(group.get("master_weights", True)))
        for group in optimizer.param_groups
    ]
    plan = StepPlan(optimizer, groups)
    jobs: dict[tuple[int, int], int] = {}
    fields: dict[StateLayout, Mapping[str, str]] = {}
    for index, shape in enumerate(groups):
        for param in shape.params:
            if type(param) not in (nn.Parameter, Tensor) or "_slot" in param.__dict__ or not param.is_contiguous():
                return None
            if param.grad is None:
                plan.idle.append(param)
                continue
            state = optimizer.state.get(param)
            if state is None:
                return None
            step = state.get("step") if optimizer.rule.counts_steps else None
            if step is not None:
                plan.counted.append(state)
                plan.steps.append(step)
            if not param.numel():
                plan.empty.append(param)
            key = (index, int(step) if step is not None else 0)
            if key not in jobs:
                jobs[key] = len(plan.jobs)
                plan.jobs.append(key)
                hyper = optimizer._hyper(optimizer.param_groups[index], max(key[1], 1), not shape.arrays)
                plan.state_dtypes.append(getattr(hyper, "state_dtype", StateDType.FP32))
            if not param.numel():
                continue
            layout = layout_of(param, shape.master_weights)
            names = _names(layout, shape, plan.state_dtypes[jobs[key]])
            if fields.setdefault(layout, names) != names:
                return None  # groups that keep different arrays
            _add(plan.batches.setdefault(layout, _Batch(layout)), param, state, jobs[key])
    plan.versions = [step._version for step in plan.steps]
    for layout, batch in plan.batches.items():
        _add_columns(batch, fields[layout])
    return plan


def _names(layout: StateLayout, shape: _GroupShape, state_dtype: StateDType) -> Mapping[str, str]:
    """Key in the state to field of the segment, of everything that a parameter has beside weight and gradient."""
    scales = {key + SCALE_SUFFIX: name + SCALE_SUFFIX for key, name in shape.arrays.items()}
    lead = LEAD_KEYS.get(layout)
    return {
        **shape.arrays,
        **(scales if state_dtype is StateDType.EIGHT_BIT else {}),
        **({lead: lead} if lead is not None else {}),
    }


def _add(batch: _Batch, param: Tensor, state: dict[str, Any], job: int) -> None:
    batch.params.append(param)
    batch.states.append(state)
    batch.numels.append(param.numel())
    batch.addresses.append(param.data_ptr())
    batch.dtypes.append(param.dtype)
    batch.weight_dtypes.append(NATIVE_DTYPES[param.dtype])
    batch.jobs.append(job)


def _add_columns(batch: _Batch, fields: Mapping[str, str]) -> None:
    nothing = [0] * len(batch.params)
    by_field: defaultdict[str, list[int]] = defaultdict(lambda: nothing)
    for key, name in fields.items():
        tensors = [state[key] for state in batch.states]
        column = _Column(key, tensors, list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors)))
        batch.columns.append(column)
        by_field[name] = column.addresses
    batch.tail = [by_field[name] for name in _TAIL_FIELDS]
