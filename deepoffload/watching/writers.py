"""Where a monitor's events go: CSV files, TensorBoard, Weights & Biases, Comet.

An event is ``(name, value, samples)``, as with DeepSpeed. Each library is imported where its section is enabled.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import tempfile
from collections.abc import Iterable
from typing import IO, Any, Protocol

from deepoffload.config import Config
from deepoffload.config.tools import CometConfig, FileMonitorConfig, WandbConfig
from deepoffload.errors import ConfigError

Event = tuple[str, float, int]

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


class Writer(Protocol):
    """One destination."""

    def write(self, events: Iterable[Event]) -> None: ...

    def close(self) -> None: ...


class CsvWriter:
    """One file for each event: ``Train_Samples_lr.csv`` of ``Train/Samples/lr``, with a line for each value. A run that
    is continued appends.

    Source: names and columns are those of DeepSpeed's ``csvMonitor``.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[str, tuple[IO[str], Any]] = {}

    def write(self, events: Iterable[Event]) -> None:
        for name, value, samples in events:
            file, rows = self._files.get(name) or self._open(name)
            rows.writerow([samples, value])
            file.flush()

    def _open(self, name: str) -> tuple[IO[str], Any]:
        path = os.path.join(self._directory, name.replace("/", "_").replace(" ", "_") + ".csv")
        file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115  # until close
        rows = csv.writer(file)
        if not file.tell():
            rows.writerow(["step", name.rpartition("/")[2]])
        self._files[name] = file, rows
        return file, rows

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()
        self._files.clear()


class TensorboardWriter:
    """Event files of TensorBoard."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=directory)

    def write(self, events: Iterable[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases. One that the program has begun is used as it is."""

    def __init__(self, said: WandbConfig) -> None:
        import wandb

        self._run = wandb.run
        self._own = self._run is None
        if self._own:
            self._run = wandb.init(project=said.project, group=said.group, entity=said.team)

    def write(self, events: Iterable[Event]) -> None:
        by_step: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            by_step.setdefault(samples, {})[name] = value
        for samples, values in by_step.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._own:
            self._run.finish()


class CometWriter:
    """An experiment of Comet. Of each event, one value for every ``samples_log_interval`` samples."""

    def __init__(self, said: CometConfig) -> None:
        import comet_ml

        self._interval = said.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment = comet_ml.start(
            api_key=said.api_key,
            project=said.project,
            workspace=said.workspace,
            experiment_key=said.experiment_key,
            mode=said.mode,
            online=said.online,
        )
        if said.experiment_name is not None:
            self._experiment.set_name(said.experiment_name)

    def write(self, events: Iterable[Event]) -> None:
        for name, value, samples in events:
            last = self._last.get(name)
            if last is None or samples - last >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name=name, value=value, step=samples)

    def close(self) -> None:
        self._experiment.end()


def enabled(config: Config) -> list[str]:
    """The monitors that a configuration asks for."""
    return [name for name in ("tensorboard", "csv_monitor", "wandb", "comet") if getattr(config, name).enabled]


def check_monitors(config: Config) -> None:
    """Raise ConfigError where the library of an enabled monitor is not installed, or its directory cannot be written.
    Directories are made."""
    for name in enabled(config):
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{name}.enabled = true, and the package {package} is not installed: pip install {package}, or use "
                "csv_monitor, which needs none"
            )
        if package is None or name == "tensorboard":
            _directory(name, getattr(config, name))


def open_writers(config: Config) -> list[Writer]:
    """All that are enabled.

    Raises:
        ConfigError: a library is missing, or a directory cannot be written.
    """
    check_monitors(config)
    writers: list[Writer] = []
    if config.csv_monitor.enabled:
        writers.append(CsvWriter(_directory("csv_monitor", config.csv_monitor)))
    if config.tensorboard.enabled:
        writers.append(TensorboardWriter(_directory("tensorboard", config.tensorboard)))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb))
    if config.comet.enabled:
        writers.append(CometWriter(config.comet))
    return writers


def _directory(name: str, said: FileMonitorConfig) -> str:
    path = os.path.join(os.path.expanduser(said.output_path), said.job_name)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ConfigError(
            f"{name}.output_path = {said.output_path!r}: {os.path.abspath(path)!r} cannot be written: "
            f"{getattr(error, 'strerror', None) or error}; name another directory"
        ) from error
    return path
