"""The step of an optimizer of ordinary parameters, repeated without looking everything up again.

Between two steps of a training loop nothing changes but values, most of the time. A plan keeps what the last step has
found out: where weights and states lie, which layout and settings they have. It is checked against what is there now,
down to the addresses, and dropped at the first difference; the long way then finds out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, contains, is_, is_not
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdagradHyper, AdamHyper, Segment, StateDType, StateLayout
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.gradients import NATIVE_DTYPES
from deepoffload.optim.ordinary import layout_of
from deepoffload.optim.rule import SCALE_SUFFIX, Hyper
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.threads import num_threads
from deepoffload.params.torch_private import leave_to_python

_TAIL_FIELDS = Segment._fields[6:]
"""Of a segment: what lies beside gradient and weight."""

_CHANGEABLE = (Tensor, list)
"""Settings that may have other values though they are the same objects."""

_layout, _dtype, _version = attrgetter("layout"), attrgetter("dtype"), attrgetter("_version")
_dict = attrgetter("__dict__")


@dataclass(slots=True)
class _Batch:
    """Parameters of one layout that had gradients: lists of the same length, for one native call.

    ``tail`` is what each segment has behind the weight, field by field; ``dtypes`` are those of the weights, then those
    of the last gradients, and ``grad_dtypes`` the latter as the kernels call them."""

    layout: StateLayout
    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    tail: list[list[int]] = field(default_factory=list)
    weight_dtypes: list[int] = field(default_factory=list)
    grad_dtypes: list[int] = field(default_factory=list)

    def segments(self) -> list[tuple[int, ...]] | None:
        """The segments (the fields of :class:`Segment`) with the gradients of now; None when a weight is not where and
        what it was, or a gradient is of a form that the kernels do not take."""
        params, count = self.params, len(self.params)
        grads = [param.grad for param in params]
        if not all(map(is_not, grads, repeat(None))) or any(map(is_not, map(_layout, grads), repeat(torch.strided))):
            return None
        both: list[Tensor] = params + grads  # type: ignore[operator]
        addresses = list(map(Tensor.data_ptr, both))
        if not (
            addresses[:count] == self.addresses
            and list(map(Tensor.numel, both)) == self.numels + self.numels
            and all(map(Tensor.is_contiguous, both))
            and not any(map(Tensor.is_neg, both[count:]))
            and self._same_dtypes(list(map(_dtype, both)))
        ):
            return None
        weights = (self.addresses, self.weight_dtypes)
        return list(zip(self.numels, self.jobs, addresses[count:], self.grad_dtypes, *weights, *self.tail, strict=True))

    def _same_dtypes(self, dtypes: list[torch.dtype]) -> bool:
        """Whether the kernels take these, of weights as before."""
        if dtypes == self.dtypes:
            return True
        count = len(self.params)
        found = [NATIVE_DTYPES.get(dtype) for dtype in dtypes[count:]]
        if dtypes[:count] != self.dtypes[:count] or None in found:
            return False
        self.dtypes, self.grad_dtypes = dtypes, found  # type: ignore[assignment]
        return True


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
        self.entries = list(chain.from_iterable(map(dict.values, self.states)))
        self.used: list[Tensor] = []
        """Of the entries, those whose memory is written."""
        self.addresses: list[int] = []
        """Of ``used``."""
        self.steps: list[Tensor] = []
        self.versions: list[int] = []
        """Of ``steps``; our own writing does not move them."""
        self.jobs: list[tuple[int, int]] = []
        """Group and number of the last step."""
        self.step_addresses: list[list[int]] = []
        """Of each job: where its parameters' steps are written."""
        self.state_dtypes: list[StateDType] = []
        self.settings: list[list[Any]] | None = None
        """Of each group, as they were checked; None where they can change unseen."""
        self.last: list[Hyper] = []
        """What ``settings`` gave when they were checked: of the kernels' settings, all but the step."""

    def prepare(
        self, optimizer: RepeatingOptimizer
    ) -> tuple[list[Hyper], list[tuple[_Batch, list[tuple[int, ...]]]]] | None:
        """What the kernel is called with for each batch; None when something is not as it was.

        Raises:
            ValueError: a setting is out of range.
        """
        groups = optimizer.param_groups
        settings = [list(group.values()) for group in groups]
        known = self._known(settings)
        if not (known or self._same_shapes(optimizer)) or not self._holds(optimizer):
            return None
        found = []
        for batch in self.batches.values():
            segments = batch.segments()
            if segments is None:
                return None
            found.append((batch, segments))
        hypers = self._next() if known else self._looked_up(optimizer, settings)
        return None if hypers is None else (hypers, found)

    def _known(self, settings: list[list[Any]]) -> bool:
        """Whether the settings are the very values that were checked for the step before, and cannot have changed."""
        if self.settings is None or len(settings) != len(self.settings):
            return False
        for now, then in zip(settings, self.settings, strict=True):
            if len(now) != len(then) or not all(map(is_, now, then)):
                return False
        return True

    def _same_shapes(self, optimizer: RepeatingOptimizer) -> bool:
        groups = optimizer.param_groups
        return len(groups) == len(self.groups) and all(
            bool(group.get("master_weights", True)) is shape.master_weights and optimizer._arrays(group) == shape.arrays
            for group, shape in zip(groups, self.groups, strict=True)
        )

    def _holds(self, optimizer: RepeatingOptimizer) -> bool:
        state = optimizer.state
        for group, shape in zip(optimizer.param_groups, self.groups, strict=True):
            params = group["params"]
            if len(params) != len(shape.params) or any(map(is_not, params, shape.params)):
                return False
            if any(map(contains, map(_dict, params), repeat("_slot"))):
                return False
        entries = list(chain.from_iterable(map(dict.values, state.values())))
        return (
            len(state) == len(self.params)
            and all(map(is_, state, self.params))
            and all(map(is_, state.values(), self.states))
            and len(entries) == len(self.entries)
            and all(map(is_, entries, self.entries))
            and list(map(Tensor.data_ptr, self.used)) == self.addresses
            and list(map(_version, self.steps)) == self.versions
            and (not self.idle or all(param.grad is None for param in self.idle))
            and (not self.empty or all(param.grad is not None and param.numel() == 0 for param in self.empty))
        )

    def _next(self) -> list[Hyper]:
        """The settings of the next step where they are known."""
        return [
            hyper._replace(step=step + 1) if isinstance(hyper, (AdamHyper, AdagradHyper)) else hyper
            for hyper, (_, step) in zip(self.last, self.jobs, strict=True)
        ]

    def _looked_up(self, optimizer: RepeatingOptimizer, settings: list[list[Any]]) -> list[Hyper] | None:
        """The settings of the next step, checked; None when one changes what states are stored in."""
        self.settings, found = None, []
        for index in {index for index, _ in self.jobs}:
            optimizer._check_settings(optimizer.param_groups[index])
        for (index, step), state_dtype in zip(self.jobs, self.state_dtypes, strict=True):
            hyper = optimizer._hyper(optimizer.param_groups[index], step + 1, not self.groups[index].arrays)
            checks.finite(hyper)
            if getattr(hyper, "state_dtype", StateDType.FP32) is not state_dtype:
                return None
            found.append(hyper)
        values = (group[key] for group in optimizer.param_groups for key in group if key != "params")
        if not any(isinstance(value, _CHANGEABLE) for value in values):
            self.settings, self.last = settings, found
        return found

    def count(self) -> None:
        """The step counts."""
        if self.steps:
            for (_, step), addresses in zip(self.jobs, self.step_addresses, strict=True):
                cpu_adam.write_floats(addresses, step + 1)
            self.jobs = [(index, step + 1) for index, step in self.jobs]


class RepeatingOptimizer(HostOptimizer):
    """A host optimizer that keeps a plan where all its parameters are ordinary ones."""

    _plan: StepPlan | None

    def _start(self) -> None:
        super()._start()
        self._plan = None

    def apply_step(self, *, unscale: float, skip_non_finite: bool, overflow: bool = False) -> bool:
        """As :meth:`HostOptimizer.apply_step`."""
        plan, self._plan = self._plan, None
        prepared = plan.prepare(self) if plan is not None else None
        if plan is None or prepared is None:
            applied = super().apply_step(unscale=unscale, skip_non_finite=skip_non_finite, overflow=overflow)
            self._plan = make_plan(self) if applied else None
            return applied
        self._plan = plan
        grad_factor, finite, self.grad_norm = unscale, True, None
        if self.max_grad_norm is not None or skip_non_finite:
            with torch.no_grad():
                grad_factor, finite = self._grad_factor(self._work(), unscale, skip_non_finite)
        if overflow or (skip_non_finite and not finite):
            return False
        plan.count()
        threads = num_threads()
        hypers, batches = prepared
        for batch, segments in batches:
            if batch.layout in MASTER_PART_KEYS:
                with torch.no_grad():
                    for param, state in zip(batch.params, batch.states, strict=True):
                        self._ordinary.follow_weight(param, state)
            self.rule.kernel(segments, hypers, batch.layout, grad_factor=grad_factor, num_threads=threads)
            self._ordinary.stepped(batch.params)
        return True

    # A training step that is compiled as a whole is cut here: Dynamo cannot follow what is in it.
    apply_step._torchdynamo_disable = True  # type: ignore[attr-defined]


leave_to_python(RepeatingOptimizer.apply_step)


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
            if param.is_complex() or not param.is_cpu:
                return None
            if param.grad is None:
                plan.idle.append(param)
                continue
            state = optimizer.state.get(param)
            if state is None:
                return None
            step = state.get("step") if optimizer.rule.counts_steps else None
            key = (index, int(step) if step is not None else 0)
            if key not in jobs:
                jobs[key] = len(plan.jobs)
                plan.jobs.append(key)
                plan.step_addresses.append([])
                hyper = optimizer._hyper(optimizer.param_groups[index], max(key[1], 1), not shape.arrays)
                plan.state_dtypes.append(getattr(hyper, "state_dtype", StateDType.FP32))
            if step is not None:
                if not _is_plain_number(step):
                    return None
                plan.steps.append(step)
                plan.step_addresses[jobs[key]].append(step.data_ptr())
            if not param.numel():
                plan.empty.append(param)
                continue
            layout = layout_of(param, shape.master_weights)
            names = _names(layout, shape, plan.state_dtypes[jobs[key]])
            if fields.setdefault(layout, names) != names:
                return None  # groups that keep different arrays
            _add(plan.batches.setdefault(layout, _Batch(layout)), param, state, jobs[key])
    for layout, batch in plan.batches.items():
        plan.used += _add_tail(batch, fields[layout])
        batch.grad_dtypes = [NATIVE_DTYPES[param.grad.dtype] for param in batch.params]  # type: ignore[union-attr]
        batch.dtypes += [param.grad.dtype for param in batch.params]  # type: ignore[union-attr]
    plan.used += plan.steps
    plan.addresses = list(map(Tensor.data_ptr, plan.used))
    plan.versions = list(map(_version, plan.steps))
    return plan


def _is_plain_number(step: Any) -> bool:
    """Whether this is a tensor that a plan can count in."""
    plain = isinstance(step, Tensor) and step.dtype is torch.float32 and step.numel() == 1
    return plain and step.device.type == "cpu" and not step.is_inference()


def _names(layout: StateLayout, shape: _GroupShape, state_dtype: StateDType) -> Mapping[str, str]:
    """Key in the state to field of the segment, of everything that a parameter has beside weight and gradient."""
    scales = {key + SCALE_SUFFIX: name + SCALE_SUFFIX for key, name in shape.arrays.items()}
    lead = MASTER_PART_KEYS.get(layout)
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


def _add_tail(batch: _Batch, fields: Mapping[str, str]) -> list[Tensor]:
    """Fill ``tail``; gives the arrays that it has the addresses of."""
    nothing = [0] * len(batch.params)
    by_field: defaultdict[str, list[int]] = defaultdict(lambda: nothing)
    arrays: list[Tensor] = []
    for key, name in fields.items():
        tensors = [state[key] for state in batch.states]
        by_field[name] = list(map(Tensor.data_ptr, tensors))
        arrays += tensors
    batch.tail = [by_field[name] for name in _TAIL_FIELDS]
    return arrays
