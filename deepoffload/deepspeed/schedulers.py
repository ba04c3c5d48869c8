"""DeepSpeed's learning rate schedules as schedulers of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from deepoffload.config import SchedulerConfig, parse_config
from deepoffload.config.keys import AUTO
from deepoffload.config.lr_schedules import TORCH_SCHEDULES, betas_at, half_cycles, lr_at
from deepoffload.errors import ConfigError, UsageError


def make_schedule(optimizer: torch.optim.Optimizer, config: SchedulerConfig) -> LRScheduler:
    """The schedule that a configuration's ``scheduler`` section names: DeepSpeed's, or one of torch's.

    Raises:
        ConfigError: a parameter is missing, ``"auto"`` or not one of the schedule's.
    """
    _refuse_auto(config)
    if config.type not in TORCH_SCHEDULES:
        return _NAMED[config.type].configured(optimizer, config)
    try:
        return getattr(torch.optim.lr_scheduler, config.type)(optimizer, **config.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: torch's {config.type} refuses them: {error}") from error


def _refuse_auto(config: SchedulerConfig) -> None:
    missing = [name for name, value in config.params.items() if value == AUTO]
    if missing:
        raise ConfigError(
            f'scheduler.params.{missing[0]} is "auto", which a trainer fills in, and none has: give a value, or '
            "pass lr_scheduler=... to initialize()"
        )


class ConfiguredSchedule(LRScheduler):
    """The schedule of a configuration's ``scheduler`` section; see :mod:`deepoffload.config.lr_schedules`.

    Args:
        optimizer: its groups' ``lr`` is set, and their ``betas`` where the schedule cycles the momentum.
        config: type and parameters.
        last_epoch: updates taken before; -1 for a new run.

    Raises:
        ConfigError: a parameter that it needs is ``"auto"``, or a list has not one value for each group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: SchedulerConfig, last_epoch: int = -1) -> None:
        _refuse_auto(config)
        groups = len(optimizer.param_groups)
        for name, value in config.params.items():
            if isinstance(value, tuple) and len(value) != groups:
                raise ConfigError(
                    f"scheduler.params.{name} has {len(value)} values, and the optimizer {groups} groups of parameters"
                )
        self.config = config
        super().__init__(optimizer, last_epoch)

    @property
    def last_batch_iteration(self) -> int:
        """DeepSpeed's number of the last update, which counts from 0; -1 before the first."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Learning rates of the update that follows ``last_epoch`` updates."""
        return [lr_at(self.config, self.last_epoch, float(base), group) for group, base in enumerate(self.base_lrs)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Adam's betas of each group at this point of the cycle; None where the schedule does not set them. As in
        DeepSpeed the first update has the smallest momentum, and before it this says the largest."""
        cycle_steps = sum(half_cycles(self.config.params)) if self.config.type == "OneCycle" else 0
        return self._betas_of_groups(self.last_epoch or cycle_steps)

    def _betas_of_groups(self, step: int) -> list[tuple[float, float]] | None:
        groups = range(len(self.optimizer.param_groups))
        found = [betas_at(self.config, step, group) for group in groups]
        return [betas for betas in found if betas is not None] or None

    def step(  # type: ignore[override]  # DeepSpeed's number comes first
        self,
        last_batch_iteration: int | None = None,
        *,
        batch_iteration: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Go on by one update, or to a given one.

        Args:
            last_batch_iteration, batch_iteration: DeepSpeed's number of the last update, which counts from 0.
            epoch: updates taken so far.

        Raises:
            UsageError: more than one of them is said.
        """
        said = [number for number in (last_batch_iteration, batch_iteration) if number is not None]
        if len(said) + (epoch is not None) > 1:
            raise UsageError(f"{type(self).__name__}.step: say one of last_batch_iteration, batch_iteration and epoch")
        if said:
            self.last_epoch = said[0]
        super().step() if epoch is None else super().step(epoch)
        betas = self._betas_of_groups(self.last_epoch)
        if betas is not None:
            for group, its in zip(self.optimizer.param_groups, betas, strict=True):
                if "betas" in group:
                    group["betas"] = its

    def state_dict(self) -> dict[str, object]:
        """As every scheduler of torch; the configuration is not part of it."""
        return {key: value for key, value in super().state_dict().items() if key != "config"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, or what that of DeepSpeed's schedule gives: its
        ``last_batch_iteration``."""
        if state_dict.keys() == {"last_batch_iteration"}:
            state_dict = {"last_epoch": state_dict["last_batch_iteration"] + 1}
        super().load_state_dict(state_dict)


class NamedSchedule(ConfiguredSchedule):
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
        said = {name: value for name, value in given.items() if value is not None}
        config = parse_config({"scheduler": {"type": kind, "params": said}})
        if config.scheduler is None:
            raise ConfigError(f"{kind}: no such schedule")
        super().__init__(optimizer, config.scheduler)

    @classmethod
    def configured(cls, optimizer: torch.optim.Optimizer, config: SchedulerConfig) -> NamedSchedule:
        """One whose parameters a configuration has."""
        made = cls.__new__(cls)
        ConfiguredSchedule.__init__(made, optimizer, config)
        return made

    def __getattr__(self, name: str) -> Any:
        """A parameter by its name, for example ``warmup_num_steps``."""
        config = self.__dict__.get("config")
        if config is not None and name in config.params:
            return config.params[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _of_each_group(self, name: str) -> list[float]:
        """A parameter's value of each group; where it was not said, the rate that the group had."""
        value: Any = self.config.params[name]
        if value is None:
            return [float(base) for base in self.base_lrs]
        return list(value) if isinstance(value, tuple) else [value] * len(self.optimizer.param_groups)


class LRRangeTest(NamedSchedule):
    """Rates that grow from a minimum, to find the largest that trains."""

    names: ClassVar[tuple[str, ...]] = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
        "last_batch_iteration",
    )

    @property
    def min_lr(self) -> list[float]:
        return self._of_each_group("lr_range_test_min_lr")


class OneCycle(NamedSchedule):
    """One rise and fall of the rate, and of the momentum against it."""

    names: ClassVar[tuple[str, ...]] = (
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

    @property
    def min_lrs(self) -> list[float]:
        return self._of_each_group("cycle_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        return self._of_each_group("cycle_max_lr")


class WarmupLR(NamedSchedule):
    """A rise to the rate of the optimizer."""

    names: ClassVar[tuple[str, ...]] = (
        "warmup_min_lr",
        "warmup_max_lr",
        "warmup_num_steps",
        "warmup_type",
        "last_batch_iteration",
    )

    @property
    def min_lrs(self) -> list[float]:
        return self._of_each_group("warmup_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        return self._of_each_group("warmup_max_lr")


class WarmupDecayLR(WarmupLR):
    """A rise, then a linear fall to zero."""

    names: ClassVar[tuple[str, ...]] = ("total_num_steps", *WarmupLR.names)


class WarmupCosineLR(NamedSchedule):
    """A rise, then a fall along a cosine."""

    names: ClassVar[tuple[str, ...]] = (
        "total_num_steps",
        "warmup_min_ratio",
        "warmup_num_steps",
        "cos_min_ratio",
        "warmup_type",
        "last_batch_iteration",
    )

    @property
    def org_lrs(self) -> list[float]:
        """The rates that the groups had before."""
        return [float(base) for base in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """What the groups' own rates are multiplied by."""
        return lr_at(self.config, self.last_epoch, 1.0)


_NAMED: Mapping[str, type[NamedSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
