"""What ranks do with Lightning's ``Trainer`` and ``Fabric``, in separate processes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import deepoffload
from deepoffload.integrations.lightning import DeepOffloadRankFabricStrategy, DeepOffloadRankStrategy
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import digests

WIDTH = 64
ROWS = 16
KEYS = {"host_budget": "1MiB", "device": "cpu", "gradient_dtype": "fp32"}


def network() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def rows() -> list[Tensor]:
    return list(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))


class Module(lightning.LightningModule):
    """``late``: the model is built in ``configure_model``. Ranks draw different numbers for it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.net = None if late else network()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return self.net(rows).square().mean()

    def validation_step(self, rows: Tensor, index: int) -> None:
        self.log("val", self.net(rows).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return deepoffload.CPUAdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, ranks: int, late: bool, epochs: int, resume: Any = None) -> Any:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    module = Module(late)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DeepOffloadRankStrategy(KEYS),
        max_epochs=epochs,
        accumulate_grad_batches=4 // ranks,
        gradient_clip_val=0.5,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's shuffles
    )
    micro_batches = DataLoader(torch.stack(rows()).view(-1, 2, WIDTH)[rank::ranks], batch_size=None)
    trainer.fit(module, micro_batches, micro_batches, ckpt_path=resume)
    return module


def train(folder: str, ranks: int, late: bool) -> list[Any]:
    """Two epochs; and the second of them again, from Lightning's own checkpoint, with another model."""
    warnings.simplefilter("default", FutureWarning)  # Lightning uses names of torch that are on their way out
    found = []
    for resume in (None, Path(folder) / "epoch=0.ckpt"):
        module = fit(Path(folder), ranks, late, 2, resume)
        found.append(digests(module.state_dict()))
        engine_of(module).close()
    return found


def fabric(folder: str, ranks: int) -> list[Any]:
    """A loop of Fabric's with accumulation, clipping, a save and a load."""
    fabric = lightning.Fabric(
        accelerator="cpu", devices=ranks, strategy=DeepOffloadRankFabricStrategy(KEYS), precision="bf16-true"
    )
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    with fabric.init_module():
        model = network()
    model, optimizer = fabric.setup(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer}
    micro_batches = torch.stack(rows()).view(4, 4, WIDTH).bfloat16()
    found = []
    for start in (0, 2, 2):
        if len(found) == 2:
            fabric.load(f"{folder}/state.ckpt", state)
        for number in range(start, start + 2):
            mine = [2 * index + fabric.global_rank for index in range(2)] if ranks == 2 else range(4)
            for index in mine:
                with fabric.no_backward_sync(model, enabled=index != mine[-1]):
                    loss = model(micro_batches[(number + index) % 4]).square().mean()
                    fabric.backward(loss / len(mine))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if not found:
            fabric.save(f"{folder}/state.ckpt", state)
        found.append(digests(model.state_dict()))
    engine_of(model).close()
    return found
