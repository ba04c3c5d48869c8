"""Other people's ways to save and resume, unmodified: the bits of a run that was never interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.serialization
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from deepoffload import CPUAdamW
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, llama, next_token_loss
from tests.support.paging import EVICTING, TIGHT, Paging
from tests.support.trainers import arguments_of

Run = tuple[Any, torch.optim.Optimizer]


def tied() -> TinyGPT:
    return TinyGPT(dropout=0.0)


def start(paging: Paging, seed: int, precision: str = "bf16", **settings: Any) -> Run:
    """Of two runs, one evicts always, and the other has another budget."""
    with paging.context(replace(TIGHT if seed else EVICTING, precision=precision), (seed + 1) << 20):
        torch.manual_seed(seed)
        model = tied()
    return model, CPUAdamW(model.parameters(), lr=1e-2, **settings)


def train(run: Run, seeds: Sequence[int]) -> None:
    model, optimizer = run
    for seed in seeds:
        next_token_loss(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(run: Run) -> Any:
    """Weights, and all that the optimizer holds, the exact masters among it."""
    state = run[1].state_dict()["state"]
    arrays = [{key: value.clone() for key, value in sorted(state[n].items())} for n in sorted(state)]
    return {name: value.clone() for name, value in weights_of(run[0]).items()}, arrays


# -- torch.distributed.checkpoint ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "stored", "precision"),
    [("save", "8bit", "bf16"), ("async_save", "fp32", "bf16"), ("async_save", "8bit", "keep")],
)
def test_distributed_checkpoints(paging: Paging, way: str, stored: str, precision: str, tmp_path: Path) -> None:
    """Saved in the background while the run goes on, and loaded into one that has made other steps."""
    run = start(paging, 0, precision, state_dtype=stored)
    train(run, range(3))
    started = getattr(distributed_checkpoint, way)(
        {"model": run[0].state_dict(), "optimizer": run[1].state_dict()}, checkpoint_id=str(tmp_path / "saved")
    )
    expected = contents(run)
    train(run, range(3, 5))
    if way == "async_save":
        started.result()
    other = start(paging, 1, precision, state_dtype=stored)
    train(other, [9])
    state = {"model": other[0].state_dict(), "optimizer": other[1].state_dict()}
    distributed_checkpoint.load(state, checkpoint_id=str(tmp_path / "saved"))
    other[0].load_state_dict(state["model"])
    other[1].load_state_dict(state["optimizer"])
    assert_same_bits(expected, contents(other))
    train(other, range(3, 5))
    assert_same_bits(contents(run), contents(other))


@pytest.mark.parametrize(("precision", "fresh"), [("bf16", True), ("bf16", False), ("keep", True)])
def test_get_and_set_state_dict(paging: Paging, precision: str, fresh: bool, tmp_path: Path) -> None:
    """torch's own names for everything. It makes a step of zeros where there was none, and loads the optimizer
    before the model."""
    run = start(paging, 0, precision)
    train(run, range(3))
    model, optimizer = get_state_dict(*run)
    assert "blocks.0.mlp.0.weight" in optimizer["state"]
    distributed_checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(tmp_path / "saved"))
    expected = contents(run)
    other = start(paging, 1, precision)
    train(other, [] if fresh else [9])
    model, optimizer = get_state_dict(*other)
    state: Any = {"model": model, "optimizer": optimizer}
    distributed_checkpoint.load(state, checkpoint_id=str(tmp_path / "saved"))
    set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_bits(expected, contents(other))
    for each in (run, other):
        train(each, range(3, 5))
    assert_same_bits(contents(run), contents(other))


def test_set_state_dict_of_another_model(paging: Paging, caplog: pytest.LogCaptureFixture) -> None:
    """torch loads the optimizer first. With fp32 weights that does not matter; with others the run says what it has
    lost, and the two calls in the other order lose nothing."""
    for precision, model_first in (("keep", False), ("bf16", False), ("bf16", True)):
        run, other = start(paging, 0, precision), start(paging, 1, precision)
        train(run, range(3))
        model, optimizer = get_state_dict(*run)
        if model_first:
            set_model_state_dict(other[0], model)
            set_optimizer_state_dict(*other, optimizer)
        else:
            set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
        lost = precision == "bf16" and not model_first
        caplog.clear()
        for each in (run, other):
            train(each, range(3, 5))
        if not lost:
            assert_same_bits(contents(run), contents(other))
        said = [record.getMessage() for record in caplog.records if record.name == "deepoffload"]
        assert len(said) == lost and all("load the weights first, then the optimizer" in text for text in said)


def test_safetensors_storage(paging: Paging, tmp_path: Path) -> None:
    """Tensors only, which is all that this storage takes: plain files that others read."""
    run = start(paging, 0)
    train(run, range(3))

    def tensors(each: Run) -> dict[str, Any]:
        optimizer: Any
        model, optimizer = get_state_dict(*each)
        arrays = {f"{name}.{key}": value for name, entry in optimizer["state"].items() for key, value in entry.items()}
        return {name: value for name, value in model.items() if name != "head.weight"} | arrays

    distributed_checkpoint.save(tensors(run), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "saved")))
    expected = {name: value.clone() for name, value in sorted(tensors(run).items())}
    other = start(paging, 1)
    train(other, [9])
    state = tensors(other)
    distributed_checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "saved")))
    assert_same_bits(expected, {name: value.clone() for name, value in sorted(state.items())})
    found: dict[str, Tensor] = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        found.update(load_file(path))
    assert_same_bits(expected, dict(sorted(found.items())))


# -- accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_accelerate_in_a_new_engine(paging: Paging, safe: bool, tmp_path: Path) -> None:
    """Tied weights in bf16, a schedule, and another budget."""
    found = []
    for seed in (0, 1):
        accelerator = Accelerator(cpu=True)
        model, optimizer = start(paging, seed)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
        if seed == 0:
            train((model, prepared), range(2))
            schedule.step()
            accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
        else:
            train((model, prepared), [7])
            accelerator.load_state(str(tmp_path / "state"))
        train((model, prepared), range(2, 5))
        found.append([*contents((model, optimizer)), optimizer.param_groups[0]["lr"]])
    assert_same_bits(found[0], found[1])


# -- transformers ----------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        tokens = batch(index, rows=1)[0]
        return {"input_ids": tokens, "labels": tokens}


def trained(
    paging: Paging, directory: Path, precision: str, *, seed: int = 0, resume: Any = None, **more: Any
) -> tuple[Any, Run]:
    """A Trainer as anybody has it, with attention dropout and a schedule; saves every second of six steps."""
    from transformers import Trainer

    arguments = arguments_of(directory, max_steps=6, save_strategy="steps", save_steps=2, **more)
    with paging.context(replace(TIGHT if seed else EVICTING, precision=precision), (seed + 1) << 20):
        torch.manual_seed(seed)
        model = llama()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    job = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), optimizers=(optimizer, schedule))
    job.train(resume_from_checkpoint=resume)
    return job, (model, optimizer)


def losses(job: Any) -> list[float]:
    return [entry["loss"] for entry in job.state.log_history if "loss" in entry]


@pytest.mark.parametrize("precision", ["bf16", "keep"])
def test_trainer_resumes(paging: Paging, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through, run = trained(paging, tmp_path, precision)
    shutil.rmtree(tmp_path / "checkpoint-6")
    loaded: list[bool] = []
    original: Callable[..., Any] = torch.load

    def seen(*args: Any, **settings: Any) -> Any:
        state = original(*args, **settings)
        if "state" in state:
            loaded.append("optimizer.pt" in Path("/proc/self/maps").read_text())
        return state

    monkeypatch.setattr(torch, "load", seen)
    with torch.utils.serialization.config.patch({"load.mmap": True}):  # what docs/checkpoints.md says, for this test
        resumed, again = trained(paging, tmp_path, precision, seed=1, resume=True)
    assert loaded == [True]
    assert losses(through) == losses(resumed) and len(losses(resumed)) == 6
    assert_same_bits(contents(run), contents(again))


def test_trainer_keeps_the_best_model(paging: Paging, tmp_path: Path) -> None:
    settings: Any = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    worst_is_best: Any = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    job, (model, _) = trained(paging, tmp_path, "bf16", **settings, **worst_is_best)
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    best = Path(job.state.best_model_checkpoint)
    assert kept == [best.name] and best.name != "checkpoint-6"
    saved = load_file(best / "model.safetensors")
    assert_same_bits(dict(sorted(saved.items())), dict(sorted(weights_of(model).items())))
