"""``deepspeed.runtime.lr_schedules``: DeepSpeed's schedules as classes, with its arguments in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from deepoffload.config import parse_config
from deepoffload.deepspeed.schedulers import ConfiguredSchedule
from deepoffload.errors import ConfigError, UsageError

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class _NamedSchedule(ConfiguredSchedule):
    """A schedule whose parameters are arguments.

    Args:
        optimizer: its groups' rates are set.
        params: DeepSpeed's, by position or name; ``last_batch_iteration`` counts the updates before, from -1.

    Raises:
        ConfigError: a parameter is wrong. UsageError: an argument is given twice, or is too many.
    """

    names: ClassVar[tuple[str, ...]]

    def __init__(self, optimizer: torch.optim.Optimizer, *params: Any, **named: Any) -> None:
        kind = type(self).__name__
        if len(params) > len(self.names):
            raise UsageError(f"{kind} takes {len(self.names)} parameters after the optimizer, not {len(params)}")
        given = dict(zip(self.names, params, strict=False))
        twice = given.keys() & named.keys()
        if twice:
            raise UsageError(f"{kind} was given {min(twice)} twice")
        given |= named
        last = given.pop("last_batch_iteration", -1)
        if last != -1:
            raise UsageError(f"{kind}(last_batch_iteration={last}): make it new, and load its state_dict()")
        config = parse_config({"scheduler": {"type": kind, "params": _said(given)}})
        if config.scheduler is None:
            raise ConfigError(f"{kind}: no such schedule")
        super().__init__(optimizer, config.scheduler)


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


class LRRangeTest(_NamedSchedule):
    """Rates that grow from a minimum, to find the largest that trains."""

    names = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    )


class OneCycle(_NamedSchedule):
    """One rise and fall of the rate, and of the momentum against it."""

    names = (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
        "last_batch_iteration",
    )


class WarmupLR(_NamedSchedule):
    """A rise to the rate of the optimizer."""

    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")


class WarmupDecayLR(_NamedSchedule):
    """A rise, then a linear fall to zero."""

    names = ("total_num_steps", *WarmupLR.names)


class WarmupCosineLR(_NamedSchedule):
    """A rise, then a fall along a cosine."""

    names = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    )
