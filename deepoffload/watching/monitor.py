"""Monitors: the numbers of each update, for CSV files, TensorBoard, Weights & Biases and Comet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.config import Config, parse_config
from deepoffload.errors import ConfigError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.engine import Engine
from deepoffload.timeline import Lane
from deepoffload.watching.writers import Event, Writer, enabled, open_writers

log = logging.getLogger("deepoffload")

TRAIN = "Train/Samples/"
"""Begins the names that DeepSpeed has, too."""
OFFLOAD = "Offload/"

_LEVELS = (
    *("host_bytes", "host_peak_bytes", "host_weight_bytes", "host_gradient_bytes", "host_state_bytes"),
    *("device_bytes", "device_peak_bytes", "nvme_bytes"),
)
_DELTAS = ("disk_bytes_read", "disk_bytes_written", "faults", "waits", "order_mismatches")
_PARTS = {Lane.WAIT: "wait", Lane.UPDATE: "update", Lane.LANDING: "landing"}

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config


class Monitor:
    """Writes the numbers of each update of a plain loop.

    ::

        monitor = deepoffload.Monitor(model, csv_monitor={"output_path": "runs"})
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.write(loss=loss, optimizer=optimizer)
        monitor.close()

    With several ranks, rank 0 writes. docs/watching.md lists the events.

    Args:
        model: built in a context, or given to ``initialize``.
        config: its sections ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet`` say what is written where; None:
            the configuration that the model was built with.
        samples_per_update: what an update counts for on the x axis; not said: the configuration's
            ``train_batch_size``, or 1.
        sections: the same sections as keywords. One that is given is enabled.

    Raises:
        ConfigError: nothing is enabled, a library is missing, or a directory cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ConfigSource | None = None,
        *,
        samples_per_update: int | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        engine = engine_of(model)
        unknown = sections.keys() - {"tensorboard", "csv_monitor", "wandb", "comet"}
        if unknown:
            raise UsageError(f"Monitor({min(unknown)}=...): expected tensorboard, csv_monitor, wandb or comet")
        source = config if config is not None or sections else engine.config
        given = {name: {"enabled": True, **said} for name, said in sections.items()}
        settings = parse_config(source, world_size=engine.ranks.world_size, **given)
        if not enabled(settings):
            raise ConfigError("Monitor: no monitor is enabled; say csv_monitor={...}, tensorboard, wandb or comet")
        self._set_up(engine, settings, samples_per_update or settings.train_batch_size or 1)

    @classmethod
    def of_engine(cls, engine: Engine, config: Config) -> Monitor:
        """The monitor of ``initialize``; where nothing is enabled, it writes nothing."""
        monitor = cls.__new__(cls)
        monitor._set_up(engine, config, config.train_batch_size or 1)
        return monitor

    def _set_up(self, engine: Engine, config: Config, samples_per_update: int) -> None:
        self.enabled = bool(enabled(config))
        self.samples_per_update = samples_per_update
        self.samples = 0
        self._engine = engine
        self._writers: list[Writer] = []
        self._before: dict[str, float] = {}
        self._written_s = time.perf_counter()
        if self.enabled and engine.ranks.rank == 0:
            self._writers = open_writers(config)
            self._before = engine.stats()

    def write(
        self,
        *,
        loss: Tensor | float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        samples: int | None = None,
        **others: float,
    ) -> None:
        """Write the numbers of an update that has just been made.

        Args:
            loss: of it. optimizer: for the rate and the norm of the gradients.
            samples: all that were trained with so far; not said: ``samples_per_update`` more than at the last call.
            others: numbers of your own, by their names.
        """
        self.samples = self.samples + self.samples_per_update if samples is None else samples
        if not self._writers:
            return
        values: dict[str, float] = {}
        if loss is not None:
            values[f"{TRAIN}train_loss"] = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if optimizer is not None:
            values[f"{TRAIN}lr"] = float(optimizer.param_groups[0]["lr"])
            if isinstance(optimizer, HostOptimizer) and optimizer.grad_norm is not None:
                values[f"{TRAIN}grad_norm"] = optimizer.grad_norm
        values |= {name if "/" in name else TRAIN + name: float(value) for name, value in others.items()}
        values |= self._of_the_engine()
        self.write_events((name, value, self.samples) for name, value in values.items())

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events of your own: ``(name, value, samples)``. A monitor that fails is switched off with a warning;
        training goes on."""
        told = list(events)
        for writer in list(self._writers):
            try:
                writer.write(told)
            except Exception as error:
                self._writers.remove(writer)
                log.warning("%s is switched off, because it cannot write: %s", type(writer).__name__, error)

    def close(self) -> None:
        """Finish the files and runs. Idempotent."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()

    def _of_the_engine(self) -> dict[str, float]:
        """Bytes per tier, and what has happened since the last update."""
        stats, before = self._engine.stats(), self._before
        begin_s, self._written_s, self._before = self._written_s, time.perf_counter(), stats
        values = {OFFLOAD + name: float(stats[name]) for name in _LEVELS if name in stats}
        values |= {OFFLOAD + name: float(stats[name] - before.get(name, 0.0)) for name in _DELTAS if name in stats}
        values[f"{OFFLOAD}step_ms"] = 1e3 * (self._written_s - begin_s)
        values[f"{OFFLOAD}wait_ms"] = 1e3 * (stats["wait_s"] - before.get("wait_s", 0.0))
        timeline = self._engine.timeline
        if timeline is not None:
            parts = timeline.seconds_since(begin_s)
            values |= {f"{OFFLOAD}{part}_ms": 1e3 * parts[lane] for lane, part in _PARTS.items()}
            others = sum(parts[lane] for lane in _PARTS)
            values[f"{OFFLOAD}compute_ms"] = max(0.0, values[f"{OFFLOAD}step_ms"] - 1e3 * others)
        return values
