"""DeepSpeed's learning rate schedules as a scheduler of torch."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from deepoffload.config import SchedulerConfig
from deepoffload.config.keys import AUTO
from deepoffload.config.lr_schedules import TORCH_SCHEDULES, betas_at, lr_at
from deepoffload.errors import ConfigError


def make_schedule(optimizer: torch.optim.Optimizer, config: SchedulerConfig) -> LRScheduler:
    """The schedule that a configuration's ``scheduler`` section names: DeepSpeed's, or one of torch's.

    Raises:
        ConfigError: a parameter is missing, ``"auto"`` or not one of the schedule's.
    """
    _refuse_auto(config)
    if config.type not in TORCH_SCHEDULES:
        return ConfiguredSchedule(optimizer, config)
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
        ConfigError: a parameter that it needs is ``"auto"``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: SchedulerConfig, last_epoch: int = -1) -> None:
        _refuse_auto(config)
        self.config = config
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Learning rates of the update that follows ``last_epoch`` updates."""
        return [lr_at(self.config, self.last_epoch, float(base), group) for group, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None, last_batch_iteration: int | None = None) -> None:
        """Go on by one update, or to ``epoch`` updates.

        Args:
            last_batch_iteration: DeepSpeed's number of the last update, which counts from 0.
        """
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step() if epoch is None else super().step(epoch)
        betas = betas_at(self.config, self.last_epoch)
        if betas is not None:
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = betas

    def state_dict(self) -> dict[str, object]:
        """As every scheduler of torch; the configuration is not part of it."""
        return {key: value for key, value in super().state_dict().items() if key != "config"}
