"""What the ranks of the tests of training states do."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import TrainingState
from deepoffload.checkpoint import saving
from deepoffload.checkpoint.copying import Copying
from deepoffload.errors import DeepOffloadError
from tests.ranks.saving import OPTIMIZERS, built, check_disk, digests, rank, small_gpt, train
from tests.support.models import VOCABULARY, batch, mixtral, next_token_loss
from tests.support.rank_processes import SOON_S

FIRST, THEN = 2, 2
"""Steps before a save and after it."""


class Turned(nn.Module):
    """Weights whose memory is in another order than that of their elements, next to a buffer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 160)
        self.turned = nn.Parameter(torch.randn(VOCABULARY, 160).t() * 0.02)
        self.cube = nn.Parameter(torch.randn(40, 6, 160).permute(2, 0, 1) * 0.02)
        self.frozen = nn.Parameter(torch.randn(160), requires_grad=False)
        self.register_buffer("scale", torch.full((160,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale + self.frozen
        hidden = hidden + torch.einsum("bsh,hij->bsh", hidden, self.cube)
        return hidden @ self.turned


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": small_gpt,
    "turned": Turned,
    "mixtral": lambda: mixtral(attention_dropout=0.0),
}


class Plain(nn.Module):
    """A model of transformers as one that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def _caller(model: nn.Module) -> nn.Module:
    return Plain(model) if hasattr(model, "config") else model


def _seed() -> None:
    """Each rank has its own random numbers."""
    torch.manual_seed(100 + rank())
    np.random.seed(200 + rank())
    random.seed(300 + rank())


def _drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.random()), random.random()


def _parts(model: nn.Module, name: str) -> tuple[Any, Any, TrainingState]:
    optimizer = OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return optimizer, schedule, TrainingState(model, optimizer, scheduler=schedule)


def _go_on(model: nn.Module, optimizer: Any, schedule: Any) -> list[Any]:
    """What a run shows from here on."""
    shown: list[Any] = [digests(optimizer.state_dict()), schedule.last_epoch]
    train(_caller(model), optimizer, range(FIRST, FIRST + THEN))
    return [*shown, digests(model.state_dict()), digests(optimizer.state_dict())]


def save(model_name: str, name: str, config: dict[str, Any], path: str, wait: bool) -> tuple[list[Any], Any]:
    """Train, save, and train on."""
    with built(config, MODELS[model_name]) as model:
        optimizer, schedule, state = _parts(model, name)
        train(_caller(model), optimizer, range(FIRST))
        schedule.step()
        _seed()
        saved = state.save(path, wait=wait)
        drawn = _drawn()
        shown = _go_on(model, optimizer, schedule)
        check_disk(model, config)
        assert Path(saved if isinstance(saved, str) else saved.wait(60)).name == f"global_step{FIRST}"
        return shown, drawn


def load(model_name: str, name: str, config: dict[str, Any], path: str) -> tuple[list[Any], Any]:
    """The same from what was saved, over weights and state that are others."""
    with built(config, MODELS[model_name]) as model:
        optimizer, schedule, state = _parts(model, name)
        train(_caller(model), optimizer, range(50, 51))
        kept = model.state_dict()  # what shows the weights shows the loaded ones
        _seed()
        torch.rand(5)
        found = state.load(path)
        assert found.step == FIRST
        drawn = _drawn()
        seen = digests(kept)
        assert seen == digests(model.state_dict())
        return _go_on(model, optimizer, schedule), drawn


def save_twice_where_one_fails(path: str) -> list[str]:
    """A save that is whole, one that fails on rank 1, and one whose calls differ; then training goes on."""
    said = []
    with built({"host_budget": "32MiB"}) as model:
        optimizer, _, state = _parts(model, "adamw")
        train(model, optimizer, range(1))
        state.save(path)
        calls: list[Callable[[], Any]] = [
            lambda: state.save(path, tag="second" if rank() == 0 else "with/slash"),
            lambda: state.save(path) if rank() == 0 else state.load(path),
            lambda: state.load(path, tag="nothing"),
            lambda: state.save(path if rank() == 0 else f"{path} of rank 1", wait=False),
            lambda: state.save(path, tag="one" if rank() == 0 else "another"),
            lambda: state.save(path, wait=rank() == 0),
            lambda: state.load(path, load_optimizer_states=rank() == 0),
            lambda: deepoffload.save_pretrained(model, path if rank() == 0 else f"{path} of rank 1"),
        ]
        for call in calls:
            try:
                call()
                said.append("nothing was raised")
            except DeepOffloadError as error:
                said.append(f"{type(error).__name__}: {error}")
        train(model, optimizer, range(1, 2))
        state.save(path)
    return said


def copy_after(wait: Callable[[], object], then: Callable[[], object] = lambda: None) -> None:
    """Saves of this process copy when ``wait`` returns, and call ``then`` afterwards."""

    class Late(Copying):
        def run(self, *, with_headers: bool) -> None:
            wait()
            super().run(with_headers=with_headers)
            then()

    saving.Copying = Late  # type: ignore[misc]


def other_tasks_while_a_save_goes_on(path: str) -> str:
    """Rank 0 has written its part of a save, and rank 1 writes when all have done other things together."""
    may_go_on = threading.Event()
    with built({"host_budget": "48MiB", "ranks": {"timeout_s": 30}}) as model:
        optimizer, _, state = _parts(model, "adamw")
        train(model, optimizer, range(1))

        copy_after(lambda: may_go_on.wait(SOON_S) if rank() == 1 else None, may_go_on.set)
        saved = state.save(path, wait=False)
        if rank() == 0:
            may_go_on.wait(SOON_S)
        optimizer.load_state_dict(optimizer.state_dict())
        deepoffload.stats(model, all_ranks=True)
        may_go_on.set()
        assert not isinstance(saved, str)
        return Path(saved.wait(SOON_S)).name


def save_while_another_waits(path: str) -> list[str]:
    """Rank 1 waits for the others before it has copied anything: at its step, for gradients, at an edit. Rank 0 waits
    for the save."""
    found = []
    with built({"host_budget": "48MiB", "ranks": {"timeout_s": 30}}) as model:
        optimizer, _, state = _parts(model, "adamw")
        train(model, optimizer, range(1))
        param = next(model.parameters())
        for step, wait in enumerate((lambda: None, lambda: param.grad, lambda: param.mul_(1.0)), 1):
            is_waiting = threading.Event()

            class Late(Copying):
                begins = is_waiting

                def run(self, *, with_headers: bool) -> None:
                    if rank() == 1:
                        self.begins.wait(SOON_S)
                        time.sleep(0.5)  # the wait asks the others first
                    super().run(with_headers=with_headers)

            saving.Copying = Late  # type: ignore[misc]
            saved = state.save(path, wait=False)
            assert not isinstance(saved, str)
            if rank() == 0:
                saved.wait(SOON_S)
            next_token_loss(model, batch(step)).backward()
            is_waiting.set()
            with torch.no_grad():
                wait()
            optimizer.step()
            optimizer.zero_grad()
            found.append(Path(saved.wait(SOON_S)).name)
    return found


def save_between_backward_and_step(path: str) -> str:
    """Only rank 0 has a gradient; all have a part of the mean."""
    with built({"host_budget": "32MiB"}) as model:
        optimizer, _, state = _parts(model, "adamw")
        train(model, optimizer, range(1))
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
        model(tokens).float().sum().backward()
        try:
            state.save(path)
            said = "nothing was raised"
        except DeepOffloadError as error:
            said = f"{type(error).__name__}: {error}"
        optimizer.step()
        return said


def die_while_saving(path: str) -> str:
    """Rank 1 is killed in the middle of the second save."""
    with built({"host_budget": "32MiB"}) as model:
        optimizer, _, state = _parts(model, "adamw")
        train(model, optimizer, range(1))
        state.save(path)
        train(model, optimizer, range(1, 2))
        if rank() == 1:

            class Killed(Copying):
                def run(self, *, with_headers: bool) -> None:
                    super().run(with_headers=with_headers)
                    os.kill(os.getpid(), signal.SIGKILL)

            saving.Copying = Killed  # type: ignore[misc]
        try:
            state.save(path)
        except DeepOffloadError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


def engine_save(path: str) -> tuple[dict[str, str], Any]:
    engine = _engine()
    _engine_steps(engine, range(2))
    engine.save_checkpoint(path, client_state={"epoch": 3, "rank": rank()})
    _engine_steps(engine, range(2, 4))
    shown = digests(engine.module.state_dict())
    engine.close()
    return shown, engine.global_steps


def engine_load(path: str) -> tuple[dict[str, str], Any]:
    engine = _engine()
    folder, client_state = engine.load_checkpoint(path)
    assert folder is not None
    assert client_state == {"epoch": 3, "rank": 0}
    _engine_steps(engine, range(2, 4))
    shown = digests(engine.module.state_dict())
    engine.close()
    return shown, engine.global_steps


def _engine() -> Any:
    torch.manual_seed(11)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "host_budget": "32MiB",
        "gradient_dtype": "fp32",
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    return deepoffload.initialize(model=small_gpt(), config=config)[0]


def _engine_steps(engine: Any, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step))
        logits = engine(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
