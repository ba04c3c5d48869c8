"""Ranks that train with durable steps, and die at chosen places."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import deepoffload
from deepoffload import CPUAdamW, TrainingState
from deepoffload.errors import DeepOffloadError, IoFailure, RankError
from tests.ranks.training_programs import digest
from tests.support.models import TinyGPT, batch, next_token_loss

PLACES = ("resuming", "forward", "backward", "stepping", "publishing", "published", "committing", "committed")


class Death(NamedTuple):
    """``rank`` is killed when it has been ``times`` times at a place of ``PLACES``."""

    rank: int
    place: str
    times: int


class Told(NamedTuple):
    """What a rank has seen.

    Attributes:
        first: the step that it resumed after; None where it has not come so far.
        losses: by step.
        end: what weights, state and random numbers are at its end.
        error: that ended it, "" where it has trained to its end.
    """

    first: int | None
    losses: dict[int, float]
    end: dict[str, str]
    error: str = ""


class Places:
    """Counts where this rank has been."""

    def __init__(self, death: Death | None) -> None:
        self._death = death
        self._times = 0

    def at(self, place: str) -> None:
        death = self._death
        if death is not None and death.rank == int(os.environ["RANK"]) and death.place == place:
            self._times += 1
            if self._times == death.times:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            self.at(before)
            result = call(*arguments)
            self.at(after)
            return result

        return called


def made(config: dict[str, Any]) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(11)
    context = deepoffload.offload_context(config)
    with context:
        model = TinyGPT(dropout=0.1)
    return model.train(), CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), context.engine


def train(
    config: dict[str, Any],
    steps: int,
    death: Death | None = None,
    wait_at: int | None = None,
    *,
    forgets: bool = False,
) -> Told:
    """Resume what is there, and train on. ``wait_at``: the step whose commit waits. ``forgets``: nothing is closed, and
    the model is gone before its last step is durable."""
    places = Places(death)
    model, optimizer, engine = made(config)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    state = TrainingState(model, optimizer, schedule=schedule)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    store = engine.durability.store
    store.publish = places.around(store.publish, "publishing", "published")
    model.blocks[2].register_forward_pre_hook(lambda *_: places.at("forward"))
    model.blocks[1].register_full_backward_hook(lambda *_: places.at("backward"))
    losses: dict[int, float] = {}
    first = None
    try:
        places.at("resuming")
        first = state.resume()
        for step in range(first, steps):
            loss = next_token_loss(model, batch(100 * step + int(os.environ["RANK"])))
            loss.backward()
            losses[step] = float(loss.detach())
            places.at("stepping")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            places.at("committing")
            state.commit(wait=step + 1 == wait_at)
            places.at("committed")
        end = _end_of(model, optimizer)
        if not forgets:
            engine.close()
        del model, optimizer, schedule, state, engine
        gc.collect()
    except RankError as error:
        return Told(first, losses, {}, f"{error}")
    return Told(first, losses, end)


def _end_of(model: nn.Module, optimizer: Any) -> dict[str, str]:
    found = {name: digest(value) for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": digest(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {**found, "random": digest(torch.get_rng_state())}


def begin(config: dict[str, Any]) -> str:
    """What a resume raises."""
    model, optimizer, _ = made(config)
    try:
        return f"resumed after {TrainingState(model, optimizer).resume()}"
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"


def lose_a_write(config: dict[str, Any]) -> list[str]:
    """The disk of rank 1 fails once while a step is made durable, and once while all are given up."""
    model, optimizer, engine = made(config)
    state, store = TrainingState(model, optimizer), engine.durability.store
    publish, discard = store.publish, store.discard
    said: list[str] = []

    def fail(*arguments: Any) -> None:
        store.publish, store.discard = publish, discard
        raise IoFailure("writing", 28, "/somewhere", 0, 4096)

    for step in range(5):
        _step(model, optimizer, step)
        if step == 2 and int(os.environ["RANK"]) == 1:
            store.publish = fail
        said.append(_said_of(step, store, partial(state.commit, wait=step == 2)))
        if step == 3:
            if int(os.environ["RANK"]) == 1:
                store.discard = fail
            said.append(_error_of(state.discard))
    engine.close()
    return said


def _step(model: nn.Module, optimizer: Any, seed: int) -> None:
    next_token_loss(model, batch(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _said_of(step: int, store: Any, commit: Callable[[], object]) -> str:
    """The durable step after a commit, or its error."""
    try:
        commit()
        return f"{step + 1}: {store.step}"
    except DeepOffloadError as error:
        return f"{step + 1}: {type(error).__name__} {error}"


def _error_of(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except DeepOffloadError as error:
        return f"{type(error).__name__} {error}"


def commit_again(config: dict[str, Any]) -> list[str]:
    """What every rank has seen of each commit, where rank 0 alone wants to change what a step has kept."""
    model, optimizer, engine = made(config)
    state, said = TrainingState(model, optimizer), []
    again = partial(state.commit, wait=True, client_state={"epoch": 1} if os.environ["RANK"] == "0" else None)
    for step in range(4):
        _step(model, optimizer, step)
        state.commit()
        said.append(_said_of(step, engine.durability.store, again if step == 1 else lambda: None))
    engine.close()
    return said


def commit_in_join(config: dict[str, Any], counts: tuple[int, int]) -> tuple[int, dict[str, str]]:
    """Ranks with different numbers of batches, each step of which is committed by all. Returns after which step they
    have resumed, and what there is at the end."""
    rank = int(os.environ["RANK"])
    model, optimizer, engine = made(config)
    state = TrainingState(model, optimizer)
    first = state.resume()
    with deepoffload.join(model, after_step=state.commit):
        for step in range(first, first + counts[rank]):
            _step(model, optimizer, 100 * step + rank)
            state.commit()
    end = _end_of(model, optimizer)
    engine.close()
    return first, end
