"""transformers' Trainer with all micro-batches of a step together: the numbers of the Trainer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.accumulation.loops import draw_seeds
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import batch, llama
from tests.support.trainers import arguments_of

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402

from deepoffload.integrations.transformers import Vertical, VerticalTrainer  # noqa: E402

MICRO_BATCHES = 4
ROWS = 18
"""Nine batches of two: steps of four, four and one."""


class Rows(torch.utils.data.Dataset[Any]):
    """Each row has another number of labels."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        tokens = batch(index, rows=1)[0]
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels}


class Seeded(Trainer):
    """The Trainer itself, each micro-batch with the seed that ``accumulate`` would draw for it."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self.seeds: list[int] = []
        samples, items = super().get_batch_samples(*args, **kwargs)
        self.count = len(samples)
        return samples, items

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.seeds = self.seeds or draw_seeds(self.count)
        program = torch.get_rng_state()
        torch.manual_seed(self.seeds.pop(0))
        loss = super().training_step(*args, **kwargs)
        torch.set_rng_state(program)
        return loss


class Events(TrainerCallback):
    """What the Trainer tells, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append("step begins")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.seen.append("micro-batch ends")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.append("step ends")


def trainer_of(kind: type[Trainer], folder: Path, nvme_path: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    with deepoffload.offload_context(
        host_budget="1MiB", nvme_path=str(nvme_path), accumulation_order="vertical", aio={"backend": "pool"}
    ):
        model = llama()
    settings = {"num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "save_strategy": "steps"} | more
    args = arguments_of(folder, gradient_accumulation_steps=MICRO_BATCHES, save_steps=2, **settings)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return kind(model, args, train_dataset=Rows(), optimizers=(optimizer, schedule), callbacks=[Events()])


def trained(trainer: Any, **how: Any) -> Any:
    """Everything that is logged, told and learned."""
    trainer.train(**how)
    names = ("loss", "grad_norm", "learning_rate", "train_loss")
    logged = [entry[name] for entry in trainer.state.log_history for name in names if name in entry]
    (events,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Events))
    return logged, events.seen, weights_of(trainer.model)


def test_losses_weights_callbacks_and_resuming_are_those_of_the_trainer(nvme_path: Path, tmp_path: Path) -> None:
    """Also of the last step of an epoch, which has one micro-batch."""
    expected = trained(trainer_of(Seeded, tmp_path / "theirs", nvme_path))
    trainer = trainer_of(VerticalTrainer, tmp_path / "ours", nvme_path)
    visits: list[int] = []
    for number, layer in enumerate(trainer.model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: visits.append(number))
    found = trained(trainer)
    assert_same_bits(expected, found)
    second = visits[3 * MICRO_BATCHES : 6 * MICRO_BATCHES]  # the first step shows the order
    assert second == [0] * MICRO_BATCHES + [1] * MICRO_BATCHES + [2] * MICRO_BATCHES
    assert found[1][: MICRO_BATCHES + 1] == ["step begins", *["micro-batch ends"] * (MICRO_BATCHES - 1), "step ends"]

    resumed = trainer_of(VerticalTrainer, tmp_path / "ours", nvme_path)
    again = trained(resumed, resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same_bits(expected[2], again[2])
    assert again[0][:-1] == found[0][:-1]  # all steps, without the mean of the run


class Looking(Trainer):
    """Calls the model once more when it has called backward, as often as it is told to."""

    backwards = 1

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        loss = None
        for _ in range(self.backwards):
            loss = super().training_step(model, inputs, *args)
        with torch.no_grad():
            looked = model(**inputs).loss
        return looked if loss is None else loss


class VerticalLooking(Vertical, Looking):
    pass


class SeededLooking(Seeded, Looking):
    pass


def test_each_micro_batch_calls_backward_once(nvme_path: Path, tmp_path: Path) -> None:
    """It may stop inside the model afterwards."""
    few = {"save_strategy": "no", "max_steps": 2}
    expected, found = (
        trained(trainer_of(kind, tmp_path / kind.__name__, nvme_path, **few))
        for kind in (SeededLooking, VerticalLooking)
    )
    assert_same_bits(expected[2], found[2])
    for backwards, said in ((0, "has not called backward for micro-batch 0"), (2, "calls backward twice")):
        trainer = trainer_of(VerticalLooking, tmp_path / said, nvme_path, **few)
        trainer.backwards = backwards
        with pytest.raises(UnsupportedError, match=said):
            trainer.train()


def test_who_changes_inputs_goes_behind_it(nvme_path: Path, tmp_path: Path) -> None:
    class Changing(VerticalTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            return super().training_step(model, dict(inputs), *args)

    with pytest.raises(UsageError, match=r"class MyVerticalTrainer\(Vertical, MyTrainer\)"):
        trainer_of(Changing, tmp_path, nvme_path, save_strategy="no").train()
