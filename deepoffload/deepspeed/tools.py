"""What an engine does in addition to training: monitors, the profile of one step, schedules of layers and data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deepoffload.config import Config, Precision
from deepoffload.deepspeed.curriculum import ArgumentSchedules, check_schedules
from deepoffload.deepspeed.utils.timer import ThroughputTimer
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.loop import TrainingLoop
from deepoffload.watching.flops import FlopsProfiler
from deepoffload.watching.flops_table import check_output, show, table
from deepoffload.watching.monitor import TRAIN, Monitor
from deepoffload.watching.writers import check_monitors


def check_tools(config: Config, model: nn.Module) -> None:
    """Raise ConfigError for what cannot work, before anything is changed."""
    check_monitors(config)
    check_output(config.flops_profiler)
    check_schedules(config, model)


class EngineTools:
    """Args:
        loop: counts the updates. timer: of the engine's calls.

    Attributes:
        monitor: writes nothing where the configuration enables none.
        schedules: change the arguments of training forwards.
        profiler: of one step; None where it is off, and on all ranks but the first.
    """

    def __init__(
        self, module: nn.Module, core: Engine, config: Config, loop: TrainingLoop, timer: ThroughputTimer
    ) -> None:
        self.monitor = Monitor.of_engine(core, config)
        self.schedules = ArgumentSchedules(config, module, lambda: loop.updates)
        self._config = config
        self._loop = loop
        self._timer = timer
        self._losses: list[tuple[int, Tensor]] = []
        self._samples = self._counted = 0
        said = config.flops_profiler
        self.profiler = FlopsProfiler(module, core) if said.enabled and core.ranks.rank == 0 else None
        self._is_profiling = False

    def profiles_now(self) -> bool:
        """Whether the update that comes next is the one that is profiled."""
        return self.profiler is not None and self._loop.updates == self._config.flops_profiler.profile_step

    @contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """Around a forward of the model."""
        if self.profiler is None or not training or not self.profiles_now():
            yield
            return
        if not self._is_profiling:
            self._is_profiling = True
            self.profiler.start()
        with self.profiler.forward():
            yield

    @contextmanager
    def backward(self, loss: object) -> Iterator[None]:
        """Around a backward."""
        if self.profiler is None or not self._is_profiling:
            yield
        else:
            with self.profiler.backward():
                yield
        self.note_loss(loss)  # one whose backward has raised is none of the update's

    def note_loss(self, loss: object) -> None:
        """A micro-batch's loss."""
        if self.monitor.enabled and isinstance(loss, Tensor):
            self._losses.append((self._loop.updates, loss.detach().reshape(())))

    def forget_losses(self) -> None:
        """The gradients of the micro-batches so far were dropped."""
        self._losses.clear()

    def after_update(self) -> None:
        """An update was made, or skipped."""
        losses = [loss for update, loss in self._losses if update == self._loop.updates - 1]
        self._losses = []
        self._samples += (self._loop.updates - self._counted) * self._timer.batch_size
        self._counted = self._loop.updates
        if self.profiler is not None and self._is_profiling:
            self._is_profiling = False
            profile = self.profiler.finish(self._timer.seconds["step"])
            if profile is not None:
                said = self._config.flops_profiler
                show(table(profile, said, self._config.train_micro_batch_size_per_gpu), said)
        if not self.monitor.enabled:
            return
        values = {f"{TRAIN}elapsed_time_ms_{what}": 1e3 * s for what, s in self._timer.seconds.items()}
        if self._config.precision is Precision.FP16:
            values[f"{TRAIN}loss_scale"] = self._loop.loss_scale
        if self._loop.grad_norm is not None:
            values[f"{TRAIN}grad_norm"] = self._loop.grad_norm
        self.monitor.write(
            loss=torch.stack([loss.float() for loss in losses]).mean() if losses else None,
            optimizer=self._loop.optimizer,
            samples=self._samples,
            **values,
        )

    def close(self) -> None:
        self.monitor.close()
