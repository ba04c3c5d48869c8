"""Monitors write what DeepSpeed writes under its names, and what moved next to it."""

from __future__ import annotations

import csv
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from deepoffload.errors import ConfigError, UsageError
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import TIGHT, Paging

SAMPLES = 4
SHARED = {"lr", "train_loss", "elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step"}


def config(nvme_path: Path, **sections: Any) -> dict[str, Any]:
    return {
        "host_budget": "400KiB",
        "nvme_path": str(nvme_path),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        **sections,
    }


def train(engine: Any, updates: int = 3) -> list[float]:
    losses = []
    for micro in range(2 * updates):
        loss = next_token_loss(engine, batch(micro))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return [(one + other) / 2 for one, other in zip(losses[::2], losses[1::2], strict=True)]


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files_are_deepspeeds_with_one_line_for_each_update(nvme_path: Path, tmp_path: Path) -> None:
    said = {"enabled": True, "output_path": str(tmp_path / "runs"), "job_name": "job"}
    engine, *_ = deepoffload.initialize(model=TinyGPT(), config=config(nvme_path, csv_monitor=said, timeline=True))
    losses = train(engine)
    folder = tmp_path / "runs" / "job"
    rows = table(folder / "Train_Samples_train_loss.csv")
    assert rows[0] == ["step", "train_loss"]
    assert [int(step) for step, _ in rows[1:]] == [4, 8, 12]
    assert [float(value) for _, value in rows[1:]] == pytest.approx(losses)
    rates = [float(value) for _, value in table(folder / "Train_Samples_lr.csv")[1:]]
    assert rates[-1] == engine.get_lr()[0] and rates == sorted(set(rates))
    assert not (folder / "Train_Samples_loss_scale.csv").exists()
    names = {path.name.removesuffix(".csv") for path in folder.iterdir()}
    assert {f"Train_Samples_{name}" for name in (*SHARED, "grad_norm")} <= names
    assert {"Offload_host_bytes", "Offload_nvme_bytes", "Offload_wait_ms", "Offload_compute_ms"} <= names
    read = [float(value) for _, value in table(folder / "Offload_disk_bytes_read.csv")[1:]]
    assert len(read) == 3 and 0 < sum(read) <= engine.stats()["disk_bytes_read"]
    parts = {name: float(table(folder / f"Offload_{name}_ms.csv")[-1][1]) for name in ("step", "wait", "compute")}
    assert 0 <= parts["wait"] <= parts["step"] and 0 < parts["compute"] <= parts["step"]
    engine.monitor.write_events([("Valid/loss", 1.5, 12)])
    assert table(folder / "Valid_loss.csv") == [["step", "loss"], ["12", "1.5"]]
    engine.close()
    again, *_ = deepoffload.initialize(model=TinyGPT(), config=config(nvme_path, csv_monitor=said))
    train(again, 1)
    assert len(table(folder / "Train_Samples_lr.csv")) == 5, "a run that is continued appends, under the same header"
    again.close()


def test_samples_and_losses_are_those_of_the_updates(nvme_path: Path, tmp_path: Path) -> None:
    """Also where the batch changes, a backward fails, or gradients are dropped."""
    said = {"enabled": True, "output_path": str(tmp_path)}
    sizes = {"train_micro_batch_size_per_gpu": 2}
    engine, *_ = deepoffload.initialize(model=TinyGPT(), config=config(nvme_path, csv_monitor=said, **sizes))
    expected = train(engine, 2)
    engine.backward(next_token_loss(engine, batch(7)))
    engine.zero_grad()
    with pytest.raises(UsageError, match="one number"):
        engine.backward(engine(batch(7)))
    engine.zero_grad()
    engine.set_train_batch_size(8)
    expected.append(sum(train(engine, 2)) / 2)
    engine.set_train_micro_batch_size(3)
    expected.append(sum(train(engine, 2)) / 2)
    rows = table(tmp_path / "DeepSpeedJobName" / "Train_Samples_train_loss.csv")[1:]
    assert [int(samples) for samples, _ in rows] == [4, 8, 16, 28]
    assert [float(loss) for _, loss in rows] == pytest.approx(expected)
    engine.close()


def test_fp16_has_its_scale(nvme_path: Path, tmp_path: Path) -> None:
    said = {"enabled": True, "output_path": str(tmp_path)}
    engine, *_ = deepoffload.initialize(
        model=TinyGPT(), config=config(nvme_path, csv_monitor=said, fp16={"enabled": True, "initial_scale_power": 8})
    )
    train(engine, 1)
    assert table(tmp_path / "DeepSpeedJobName" / "Train_Samples_loss_scale.csv")[1] == ["4", "256.0"]
    engine.close()


class Recorder(types.ModuleType):
    """Stands for a library: it keeps what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[Any, ...]] = []
        self.ended = 0
        self.run = None

    def init(self, **said: Any) -> Recorder:
        self.started.append(said)
        return self

    start = init

    def SummaryWriter(self, **said: Any) -> Recorder:
        return self.init(**said)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged += [(name, value, step) for name, value in values.items()]

    def log_metric(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))

    def set_name(self, name: str) -> None:
        self.started.append({"name": name})

    def flush(self) -> None: ...

    def finish(self) -> None:
        self.ended += 1

    end = close = finish


@pytest.mark.parametrize(
    ("section", "modules", "said", "started"),
    [
        (
            "wandb",
            ["wandb"],
            {"project": "p", "group": "g", "team": "t"},
            {"project": "p", "group": "g", "entity": "t"},
        ),
        (
            "tensorboard",
            ["tensorboard", "torch.utils.tensorboard"],
            {"output_path": "runs", "job_name": "job"},
            {"log_dir": "runs/job"},
        ),
        (
            "comet",
            ["comet_ml"],
            {"samples_log_interval": 8, "api_key": "s3cret", "experiment_name": "mine"},
            {
                **dict.fromkeys(("project", "workspace", "experiment_key", "mode", "online")),
                "api_key": "s3cret",
            },
        ),
    ],
)
def test_libraries_get_the_events(
    nvme_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    modules: list[str],
    said: dict[str, Any],
    started: dict[str, Any],
) -> None:
    library = Recorder(section)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.chdir(tmp_path)
    engine, *_ = deepoffload.initialize(
        model=TinyGPT(), config=config(nvme_path, **{section: {"enabled": True, **said}})
    )
    train(engine)
    assert library.started[0] == started
    steps = [step for name, _, step in library.logged if name == "Train/Samples/lr"]
    assert steps == ([4, 12] if section == "comet" else [4, 8, 12])
    assert "s3cret" not in repr(engine.core.config)
    engine.close()
    assert library.ended == 1


def test_a_library_that_is_missing_is_an_error_before_anything(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for section, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        model = TinyGPT()
        with pytest.raises(ConfigError, match=f"{section}.enabled = true, and the package {package} is not installed"):
            deepoffload.initialize(model=model, config=config(nvme_path, **{section: {"enabled": True}}))
        assert all(type(param) is torch.nn.Parameter for param in model.parameters())


def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(nvme_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = {"enabled": True, "output_path": str(tmp_path / "file")}
    model = TinyGPT()
    for path in (said["output_path"], "no\0path"):
        with pytest.raises(ConfigError, match="csv_monitor.output_path = .*cannot be written"):
            deepoffload.initialize(model=model, config=config(nvme_path, csv_monitor={**said, "output_path": path}))
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    for path in (str(tmp_path / "file" / "table"), "no\0path"):
        with pytest.raises(ConfigError, match="flops_profiler.output_file = .*cannot be written"):
            profiler = {"enabled": True, "output_file": path}
            deepoffload.initialize(model=TinyGPT(), config=config(nvme_path, flops_profiler=profiler))


def test_a_monitor_that_fails_later_is_switched_off_and_training_goes_on(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"enabled": True, "output_path": str(tmp_path)}
    engine, *_ = deepoffload.initialize(model=TinyGPT(), config=config(nvme_path, csv_monitor=said))
    (tmp_path / "DeepSpeedJobName").rmdir()
    with caplog.at_level(logging.WARNING, "deepoffload"):
        assert len(train(engine)) == 3
    assert sum("is switched off" in record.message for record in caplog.records) == 1
    engine.close()


def test_the_monitor_of_a_plain_loop(paging: Paging, tmp_path: Path) -> None:
    model = paging.build(TinyGPT, TIGHT)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
    monitor = deepoffload.Monitor(model, csv_monitor={"output_path": str(tmp_path)}, samples_per_update=2)
    for step in range(3):
        loss = next_token_loss(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.write(loss=loss, optimizer=optimizer, tokens=32)
    monitor.close()
    monitor.close()
    folder = tmp_path / "DeepSpeedJobName"
    assert table(folder / "Train_Samples_tokens.csv")[1:] == [["2", "32.0"], ["4", "32.0"], ["6", "32.0"]]
    assert float(table(folder / "Train_Samples_train_loss.csv")[-1][1]) == loss.item()
    with pytest.raises(ConfigError, match="no monitor is enabled"):
        deepoffload.Monitor(model)
    with pytest.raises(UsageError, match="expected tensorboard"):
        deepoffload.Monitor(model, trackio={})
