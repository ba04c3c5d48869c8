"""DeepSpeed's learning rate schedules as pure functions of the step, for ``torch.optim.lr_scheduler.LambdaLR``.

``step`` counts the optimizer steps already taken: step 0 gives the rate of the first update. DeepSpeed's own schedulers
start one iteration earlier (``last_batch_iteration`` is ``step - 1``), which these functions follow, so that a run has
the same rates as DeepSpeed's. Source: ``deepspeed/runtime/lr_schedules.py``.

The 1Cycle and range-test policies: L. N. Smith, "A disciplined approach to neural network hyper-parameters: part 1",
arXiv:1803.09820.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepoffload.config.keys import AUTO, Mismatch, ValueKind, boolean, either, integer, list_of, number
from deepoffload.config.schema import SchedulerConfig

ONE_CYCLE_BETA2 = 0.99
"""DeepSpeed's OneCycle sets the second beta to this and ignores the optimizer's."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a schedule; ``required`` ones have no default."""

    kind: ValueKind
    default: object = None
    required: bool = False


WARMUP_TYPE = "warmup_type"
_WARMUP_TYPES = ("log", "linear")


def unknown_warmup(parameters: Mapping[str, object]) -> bool:
    """Whether a warm-up is asked for that DeepSpeed replaces with ``"log"``, with a warning."""
    said = parameters.get(WARMUP_TYPE)
    return isinstance(said, str) and said not in (*_WARMUP_TYPES, AUTO)


def _warmup_type() -> ValueKind:
    def normalise(value: object) -> object:
        if not isinstance(value, str):
            raise Mismatch
        return value if value in _WARMUP_TYPES else "log"

    return ValueKind('"log" or "linear" (another text is taken as "log", with a warning)', normalise)


def _from_the_start() -> ValueKind:
    def normalise(value: object) -> object:
        if isinstance(value, bool) or value != -1:
            raise Mismatch("expected -1: a schedule starts with its run, and load_checkpoint() continues both")
        return -1

    return ValueKind("-1", normalise)


_RATES = either(number(0), list_of(number(0)))
_MOMENTA = either(number(0, below=1), list_of(number(0, below=1)))
_START = {"last_batch_iteration": Parameter(_from_the_start(), -1)}
_WARMUP = {
    "warmup_num_steps": Parameter(integer(), 1000),
    WARMUP_TYPE: Parameter(_warmup_type(), "log"),
    **_START,
}
SCHEDULES: Mapping[str, Mapping[str, Parameter]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Parameter(_RATES, 1e-3),
        "lr_range_test_step_size": Parameter(integer(1), 2000),
        "lr_range_test_step_rate": Parameter(number(), 1.0),
        "lr_range_test_staircase": Parameter(boolean(), False),
        **_START,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter(_RATES, required=True),
        "cycle_max_lr": Parameter(_RATES, required=True),
        "decay_lr_rate": Parameter(number(0), 0.0),
        "cycle_first_step_size": Parameter(integer(1), 2000),
        "cycle_second_step_size": Parameter(integer()),
        "cycle_first_stair_count": Parameter(integer(), 0),
        "cycle_second_stair_count": Parameter(integer()),
        "decay_step_size": Parameter(integer(), 0),
        "cycle_momentum": Parameter(boolean(), True),
        "cycle_min_mom": Parameter(_MOMENTA, 0.8),
        "cycle_max_mom": Parameter(_MOMENTA, 0.9),
        "decay_mom_rate": Parameter(number(0), 0.0),
        **_START,
    },
    "WarmupLR": {
        "warmup_min_lr": Parameter(_RATES, 0.0),
        "warmup_max_lr": Parameter(_RATES),
        **_WARMUP,
    },
    "WarmupDecayLR": {
        "total_num_steps": Parameter(integer(1), required=True),
        "warmup_min_lr": Parameter(_RATES, 0.0),
        "warmup_max_lr": Parameter(_RATES, 1e-3),
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": Parameter(integer(1), required=True),
        "warmup_min_ratio": Parameter(number(0), 0.0),
        "cos_min_ratio": Parameter(number(0), 1e-4),
        **_WARMUP,
    },
}
"""Parameters of every schedule with DeepSpeed's defaults. ``None`` for a maximal rate: the optimizer's own rate."""


TORCH_SCHEDULES = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
    *("MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR"),
)
"""Those of ``torch.optim.lr_scheduler`` whose arguments can be written down; DeepSpeed builds them by these names,
too, and their parameters are torch's."""


def lr_at(scheduler: SchedulerConfig, step: int, base_lr: float, group: int = 0) -> float:
    """The learning rate of the update that follows ``step`` updates.

    Args:
        base_lr: the rate the optimizer was built with (the first group's for a maximum that was not said).
        group: index of the parameter group, for parameters given as a list.
    """
    return _LR_OF[scheduler.type](dict(scheduler.params), step, base_lr, group)


def betas_at(scheduler: SchedulerConfig, step: int, group: int = 0) -> tuple[float, float] | None:
    """Adam's betas for the update that follows ``step`` updates, where the schedule sets them; else ``None``.

    Only OneCycle does, unless ``cycle_momentum`` is off. Its first update takes the smallest momentum, as DeepSpeed's.
    """
    if scheduler.type != "OneCycle" or not scheduler.params["cycle_momentum"]:
        return None
    params: dict[str, Any] = dict(scheduler.params)
    low, high = _of_group(params["cycle_min_mom"], group), _of_group(params["cycle_max_mom"], group)
    if step == 0:
        return low, ONE_CYCLE_BETA2
    cycle_steps = sum(half_cycles(params))
    if step - 1 < cycle_steps:
        return high - (high - low) * _cycle_scale(params, step), ONE_CYCLE_BETA2
    if params["decay_step_size"] == 0 or params["decay_mom_rate"] == 0:
        return high, ONE_CYCLE_BETA2
    return high * (1 + params["decay_mom_rate"] * (step - cycle_steps) / params["decay_step_size"]), ONE_CYCLE_BETA2


def _of_group(value: Any, group: int) -> float:
    return float(value[group] if isinstance(value, tuple) else value)


def _warmup_share(params: Mapping[str, Any], iteration: int) -> float | None:
    """How far the warm-up has come, 0 to 1; ``None`` once it is over. ``iteration`` is DeepSpeed's."""
    steps = max(2, params["warmup_num_steps"])
    if iteration >= steps:
        return None
    return math.log(iteration + 1) / math.log(steps) if params["warmup_type"] == "log" else iteration / steps


def _warmup(params: dict[str, Any], step: int, base_lr: float, group: int, after: Callable[[int], float]) -> float:
    low = _of_group(params["warmup_min_lr"], group)
    if step == 0:
        return low
    high = base_lr if params["warmup_max_lr"] is None else _of_group(params["warmup_max_lr"], group)
    share = _warmup_share(params, step - 1)
    return low + (high - low) * (after(step - 1) if share is None else share)


def _warmup_lr(params: dict[str, Any], step: int, base_lr: float, group: int) -> float:
    return _warmup(params, step, base_lr, group, after=lambda iteration: 1.0)


def _warmup_decay_lr(params: dict[str, Any], step: int, base_lr: float, group: int) -> float:
    total, warm = params["total_num_steps"], max(2, params["warmup_num_steps"])
    return _warmup(params, step, base_lr, group, lambda iteration: max(0.0, (total - iteration) / max(1, total - warm)))


def _warmup_cosine_lr(params: dict[str, Any], step: int, base_lr: float, group: int) -> float:
    if step == 0:
        return 0.0
    iteration = step - 1
    share = _warmup_share(params, iteration)
    if share is not None:
        low = params["warmup_min_ratio"]
        return float(base_lr * (low + share * (1.0 - low)))
    warm = max(2, params["warmup_num_steps"])
    progress = min(1.0, (iteration - warm + 1) / max(1, params["total_num_steps"] - warm))
    low = params["cos_min_ratio"]
    return float(base_lr * max(0.0, low + (1.0 - low) * (1 + math.cos(math.pi * progress)) / 2))


def _lr_range_test(params: dict[str, Any], step: int, base_lr: float, group: int) -> float:
    intervals = step / params["lr_range_test_step_size"]
    if params["lr_range_test_staircase"]:
        intervals = math.floor(intervals)
    return float(_of_group(params["lr_range_test_min_lr"], group) * (1 + params["lr_range_test_step_rate"] * intervals))


def half_cycles(params: Mapping[str, Any]) -> tuple[int, int]:
    """Steps of the rising and of the falling half."""
    first = params["cycle_first_step_size"]
    second = params["cycle_second_step_size"]
    return first, first if second is None else second


def _cycle_scale(params: Mapping[str, Any], step: int) -> float:
    """0 at both ends of the cycle, 1 at its peak, in stairs where they were asked for."""
    first, second = half_cycles(params)
    position = step % (first + second)
    rising = position <= first
    scale = position / first if rising else (first + second - position) / second
    stairs = params["cycle_first_stair_count"]
    if not rising and params["cycle_second_stair_count"] is not None:
        stairs = params["cycle_second_stair_count"]
    return math.floor(scale * stairs + _STAIR_SLACK) / stairs if stairs else scale


_STAIR_SLACK = 1e-9
"""Keeps a quotient that is a whole stair but for rounding on that stair."""


def _one_cycle(params: dict[str, Any], step: int, base_lr: float, group: int) -> float:
    low, high = _of_group(params["cycle_min_lr"], group), _of_group(params["cycle_max_lr"], group)
    cycle_steps = sum(half_cycles(params))
    if step - 1 < cycle_steps:
        return float(low + (high - low) * _cycle_scale(params, step))
    if params["decay_step_size"] == 0:
        return float(low)
    return float(low / (1 + params["decay_lr_rate"] * (step - cycle_steps) / params["decay_step_size"]))


_LR_OF: Mapping[str, Callable[[dict[str, Any], int, float, int], float]] = {
    "LRRangeTest": _lr_range_test,
    "OneCycle": _one_cycle,
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
}
