"""Lightning's Trainer and Fabric with our strategies: losses and weights of the same run without them, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import deepoffload
from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits, weights_of

lightning = pytest.importorskip("lightning")

from deepoffload.integrations.lightning import (  # noqa: E402
    DeepOffloadFabricStrategy,
    DeepOffloadRankFabricStrategy,
    DeepOffloadRankStrategy,
    DeepOffloadStrategy,
)

WIDTH = 64
BATCHES = 4
"""Of one epoch: two steps of two micro-batches."""


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loader() -> DataLoader[Any]:
    rows = torch.randn(2 * BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """``late``: the model is built in ``configure_model``."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.net = None if late else network()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        loss = self.net(rows).square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, rows: Tensor, index: int) -> None:
        self.log("val", self.net(rows).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = deepoffload.CPUAdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(strategy: Any, late: bool, precision: str, folder: Path, epochs: int = 2, resume: Any = None) -> Any:
    module = Module(late)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision=precision,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return module


def strategy(nvme_path: Path, **keys: Any) -> DeepOffloadStrategy:
    config = {"zero_optimization": {"stage": 3}}
    return DeepOffloadStrategy(config, host_budget="64KiB", nvme_path=str(nvme_path), **keys)


@pytest.mark.parametrize(
    ("precision", "late"), [("32-true", False), ("32-true", True), ("bf16-true", True), ("bf16-mixed", False)]
)
def test_the_trainer_clips_accumulates_evaluates_saves_and_resumes(precision, late, nvme_path, tmp_path):
    plain = fit("auto", late, precision, tmp_path / "plain")
    through = fit(strategy(nvme_path), late, precision, tmp_path / "through")
    assert type(through.net[0].weight) is OffloadedParameter
    if precision == "32-true":
        assert_same_bits([plain.seen, weights_of(plain.net)], [through.seen, weights_of(through.net)])
    fit(strategy(nvme_path), late, precision, tmp_path / "first", epochs=1)
    (saved,) = (tmp_path / "first").iterdir()
    resumed = fit(strategy(nvme_path), late, precision, tmp_path / "second", resume=saved)
    assert_same_bits(through.seen[BATCHES:], resumed.seen)
    assert_same_bits(weights_of(through.net), weights_of(resumed.net))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".ckpt"}


def test_masters_stay_exact_where_lightning_converts_a_model(nvme_path, tmp_path, caplog):
    """Plain ``bf16-true`` throws the fp32 values away."""
    settings = {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW"}}
    module = fit(strategy(nvme_path, **settings), False, "bf16-true", tmp_path, epochs=1)
    assert "optimizer of the configuration: not used, the program makes its own" in caplog.text
    assert module.net[0].weight.dtype is torch.bfloat16
    assert deepoffload.stats(module)["disk_bytes_written"] > 0


def test_what_cannot_be_is_refused(nvme_path, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match='precision is "fp16" in the configuration and "bf16-true" in Lightning'):
        fit(strategy(nvme_path, precision="fp16"), True, "bf16-true", tmp_path)
    with pytest.raises(
        ConfigError, match="gradient_clipping = 1.0, but .* 0.5; gradient_accumulation_steps = 4, but .* 2"
    ):
        fit(strategy(nvme_path, gradient_clipping=1.0, gradient_accumulation_steps=4), False, "32-true", tmp_path)
    with pytest.raises(ConfigError, match="host_bugdet: unknown key"):
        DeepOffloadStrategy(host_bugdet=1)
    ours = {"trainer": DeepOffloadStrategy, "fabric": DeepOffloadFabricStrategy}
    for several, said in (({"devices": 2}, "devices=2"), ({"devices": 1, "num_nodes": 2}, "num_nodes=2")):
        for name, make in (("trainer", lightning.Trainer), ("fabric", lightning.Fabric)):
            match = rf"{ours[name].__name__} trains with one rank, .* {said}: take DeepOffloadRank"
            with pytest.raises(UnsupportedError, match=match):
                make(accelerator="cpu", strategy=ours[name](host_budget="1MiB"), **several)
    for kind in (DeepOffloadRankStrategy, DeepOffloadRankFabricStrategy):
        with pytest.raises(ConfigError, match="host_bugdet: unknown key"):
            kind(host_bugdet=1)
        kind({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})  # 2 ranks
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for kind in (DeepOffloadStrategy, DeepOffloadFabricStrategy):
        with pytest.raises(
            UnsupportedError, match="trains with one rank, and a launcher has started 2: take DeepOffloadRank"
        ):
            kind(host_budget="1MiB")


@pytest.mark.parametrize(("precision", "late"), [("32-true", False), ("bf16-true", True)])
def test_fabric(precision, late, nvme_path, tmp_path):
    def run(strategy: Any, steps: int, resume: bool = False) -> tuple[list[Tensor], Any]:
        fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, precision=precision)
        fabric.launch()
        if late:
            with fabric.init_module():
                model = network()
        else:
            model = network()
        model, optimizer = fabric.setup(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2))
        if resume:
            fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
        seen = []
        for number in range(steps):
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number + (2 if resume else 0)))
            loss = model(rows).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
            if number == 1 and not resume:
                fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
        return seen, model

    def ours() -> DeepOffloadFabricStrategy:
        return DeepOffloadFabricStrategy(host_budget="64KiB", nvme_path=str(nvme_path))

    expected, _ = run("auto", 4)
    seen, model = run(ours(), 4)
    assert type(next(model.parameters())) is OffloadedParameter
    if precision == "32-true":
        assert_same_bits(expected, seen)
    resumed, _ = run(ours(), 2, resume=True)
    assert_same_bits(seen[2:], resumed)


MEMORY = """
import json, os, sys
import torch, lightning
from torch import nn
import deepoffload
from deepoffload.integrations.lightning import DeepOffloadStrategy
from tests.support.memory_watch import MemoryWatch, give_back

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None
    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(14)])
    def training_step(self, rows, index):
        return self.net(rows).sum()
    def configure_optimizers(self):
        return deepoffload.CPUAdamW(self.parameters(), lr=1e-3)

def fit(steps, resume=None):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = DeepOffloadStrategy(host_budget="24MiB", nvme_path=folder)
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 1024), batch_size=2), ckpt_path=resume)
    return trainer

folder = sys.argv[1]
watch, seen = MemoryWatch(), {}
trainer = fit(2)
seen["training"] = watch.take_peak()
trainer.save_checkpoint(folder + "/saved.ckpt")
seen["saving"] = watch.take_peak()
del trainer
give_back()
watch.take_peak()
fit(3, folder + "/saved.ckpt")
seen["resuming"] = watch.take_peak()
print(json.dumps({**seen, "file": os.path.getsize(folder + "/saved.ckpt")}))
"""


@pytest.mark.slow
def test_checkpoints_take_no_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["file"] > 160 << 20
    assert max(seen["saving"], seen["resuming"]) < seen["training"] + (32 << 20), seen
