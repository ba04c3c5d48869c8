"""What ranks do with transformers' ``Trainer`` and with accelerate, in separate processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

import deepoffload
from deepoffload.integrations.accelerate import RankAccelerator
from deepoffload.integrations.transformers import OnRanks, fill_auto, optimizers_of
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import digests
from tests.support.models import VOCABULARY, llama
from tests.support.trainers import arguments_of

ROWS = 24


class RankTrainer(OnRanks, Trainer):  # type: ignore[misc]
    """The Trainer for several ranks."""


PAGED: dict[str, Any] = {"host_budget": "32MiB", "gradient_dtype": "fp32"}
FILE: dict[str, Any] = {
    **PAGED,
    **dict.fromkeys(("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}
"""As people have it for DeepSpeed."""


def built(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with deepoffload.offload_context(config):
        return llama(attention_dropout=0.0)


def rows() -> list[dict[str, Any]]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, 10), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(folder: Path, accumulate: int, steps: int) -> Any:
    """A Trainer whose model, optimizer and schedule are those of a DeepSpeed file."""
    arguments = arguments_of(
        folder,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        warmup_steps=3,
        save_strategy="steps",
        save_steps=2,
        train_sampling_strategy="sequential",
    )
    config = fill_auto(FILE, arguments)
    model = built(config)
    return RankTrainer(model, arguments, train_dataset=rows(), optimizers=optimizers_of(config, model))


def train(folder: str, world_size: int) -> tuple[dict[str, str], list[float], dict[str, str]]:
    """Four steps; and the last two of them again, from the Trainer's own checkpoint, with another model."""
    trainer = trainer_of(Path(folder), 2 // world_size, 4)
    trainer.train()
    weights = digests(trainer.model.state_dict())
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    engine_of(trainer.model).close()
    again = trainer_of(Path(folder), 2 // world_size, 4)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    resumed = digests(again.model.state_dict())
    engine_of(again.model).close()
    return weights, norms, resumed


def accelerate(world_size: int) -> tuple[dict[str, str], list[float]]:
    """A loop of accelerate's, in which each rank gets its batches from the prepared loader."""
    model = built(PAGED)
    accelerator = RankAccelerator(cpu=True, gradient_accumulation_steps=2 // world_size)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]
    prepared, its_optimizer, its_loader = accelerator.prepare(model, optimizer, loader)
    assert prepared is model
    norms = []
    for batch in its_loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.5)))
            its_optimizer.step()
            its_optimizer.zero_grad()
    weights = digests(model.state_dict())
    engine_of(model).close()
    return weights, norms
