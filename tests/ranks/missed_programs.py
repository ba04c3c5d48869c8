"""Programs in which one rank makes a call that all ranks have to make, and the others go on to something else."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepoffload
from deepoffload import CPUAdamW
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_optimizer_state
from deepoffload.errors import DeepOffloadError
from deepoffload.optim import contributions
from deepoffload.ranks import long_waits
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import built, train
from tests.ranks.state_saving import copy_after
from tests.support.models import batch, next_token_loss
from tests.support.rank_processes import LONG_S
from tests.support.waiting import wait_until

CONFIG: dict[str, Any] = {"host_budget": "32MiB", "ranks": {"timeout_s": LONG_S}}

NOT_HEARD_S = 30.0
"""By then an error is told, on a machine that has much else to do."""


def save(model: nn.Module, optimizer: Any, path: str) -> None:
    deepoffload.TrainingState(model, optimizer).save(path)


def look_at_stats(model: nn.Module, optimizer: Any, path: str) -> None:
    deepoffload.stats(model, all_ranks=True)


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def save_pretrained(model: nn.Module, optimizer: Any, path: str) -> None:
    """Rank 0 alone may call it, no other."""
    deepoffload.save_pretrained(model, path, rank0_only=True)


def step(model: nn.Module, optimizer: Any, path: str) -> None:
    train(model, optimizer, range(2, 4))


def close(model: nn.Module, optimizer: Any, path: str) -> None:
    engine_of(model).close()


def edit(model: nn.Module, optimizer: Any, path: str) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def look_at_gradient(model: nn.Module, optimizer: Any, path: str) -> None:
    """It is the mean over ranks, of which others have not made their backward."""
    next_token_loss(model, batch(2)).backward()
    assert next(model.parameters()).grad is not None


def join(model: nn.Module, optimizer: Any, path: str) -> None:
    with deepoffload.join(model):
        pass


def meet(model: nn.Module, optimizer: Any, path: str) -> None:
    """All ranks wait for each other there, too, but not for what they wait for at a save."""
    param = next(model.parameters())
    safe_set_full_optimizer_state(param, torch.zeros(param.shape), "exp_avg")


Call = Callable[[nn.Module, Any, str], None]


def apart(calls: dict[int, Call], others: Call, path: str) -> tuple[str, float]:
    """The ranks in ``calls`` make these, the others something else. Returns what is raised, and after how long."""
    contributions.WAIT_S = LONG_S  # a gradient does not wait in its slot for ranks that wait for this one
    with built(CONFIG) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        begin = time.monotonic()
        try:
            calls.get(int(os.environ["RANK"]), others)(model, optimizer, path)
            train(model, optimizer, range(4, 6))
        except DeepOffloadError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
        return "nothing was raised", time.monotonic() - begin


def gradients(models: Sequence[nn.Module], order: int) -> list[torch.Tensor]:
    """The means over all ranks of what one backward of each model gives. ``order``: 1, or -1 for that of other ranks
    the other way round."""
    for model in models[::order]:
        next_token_loss(model, batch(100 + int(os.environ["RANK"]))).backward()
    found = [param.grad.clone() for model in models for param in model.parameters() if param.grad is not None]
    for model in models:
        model.zero_grad()
    return found


def in_two_models(calls: Sequence[Call], path: str) -> tuple[str, float]:
    """Each rank makes its call, with another one of two models than the rank before. Before, their backwards
    come in another order there. Returns as :func:`apart`."""
    rank = int(os.environ["RANK"])
    said = "nothing was raised", 0.0
    contributions.WAIT_S = LONG_S  # a gradient does not wait in its slot for ranks that wait for this one
    with suppress(DeepOffloadError), built(CONFIG) as first, built(CONFIG) as second:
        models = [(model, CPUAdamW(model.parameters(), lr=1e-2)) for model in (first, second)]
        for model, optimizer in models:
            train(model, optimizer, range(2))
        together = gradients([first, second], 1)
        assert all(map(torch.equal, together, gradients([first, second], -1 if rank % 2 else 1)))
        begin = time.monotonic()
        try:
            calls[rank](*models[rank % 2], path)
        except DeepOffloadError as error:
            said = f"{type(error).__name__}: {error}", time.monotonic() - begin
            raise
    return said


def end_instead(path: str) -> None:
    """Rank 0 saves, and the programs of the others end."""
    torch.manual_seed(11)
    with deepoffload.offload_context(CONFIG):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if os.environ["RANK"] == "0":
        deepoffload.TrainingState(model, optimizer).save(path)


def leave_while_saving(path: str, fails: bool) -> tuple[str, list[bool]]:
    """Rank 1 ends, or fails, while a save is under way in the background. Rank 0 copies when its program has heard of
    that. Returns what is raised, and whether it was heard in time."""
    heard, in_time = threading.Event(), []
    said = "nothing was raised"
    with suppress(DeepOffloadError, KeyError), built(CONFIG) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(1))
        if os.environ["RANK"] == "0":
            copy_after(lambda: in_time.append(heard.wait(NOT_HEARD_S)))
        deepoffload.TrainingState(model, optimizer).save(path, wait=False)
        try:
            if os.environ["RANK"] == "0":
                train(model, optimizer, range(1, 3))
            elif fails:
                raise KeyError("the data loader has no such sample")
            else:
                engine_of(model).close()
        except DeepOffloadError as error:
            said = f"{type(error).__name__}: {error}"
            heard.set()
            raise
    return said, in_time


def late(path: str, seconds: float) -> list[str]:
    """Ranks 0 and 1 wait long at a save, at numbers of all ranks and at a load, to which rank 2 comes later: it
    evaluates alone before, and computes. Then rank 0 waits at a step of a model, and the others at one of another
    model, which a thread of rank 0 comes to later. Returns what is logged."""
    rank = int(os.environ["RANK"])
    lines = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepoffload").addHandler(handler)
    long_waits.NOTICE_AFTER_S, long_waits.ANSWERED_AFTER_S = seconds / 4, seconds / 4
    with built(CONFIG) as model, built(CONFIG) as another:
        others = CPUAdamW(another.parameters(), lr=1e-2)
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        for call in (save, look_at_stats, load):
            if rank == 2:
                with torch.no_grad():
                    model(torch.zeros(1, 8, dtype=torch.long))
                time.sleep(seconds)
            call(model, optimizer, path)
            train(model, optimizer, range(2, 3))
        for each in (model, another):
            next_token_loss(each, batch(3)).backward()
        thread = threading.Timer(seconds, others.step)
        (others.step if rank else thread.start)()
        optimizer.step()
        if not rank:
            thread.join()
        assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    return lines


def look_in_a_thread(seconds: float) -> int:
    """Another thread than the one that trains looks at the numbers of all ranks. That of rank 1 comes to it late, when
    the training of rank 1 already waits for that of rank 0."""
    rank = int(os.environ["RANK"])
    with built(CONFIG) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        found: list[Any] = []

        def look() -> None:
            time.sleep(rank * seconds)
            found.extend(deepoffload.stats(model, all_ranks=True))

        thread = threading.Thread(target=look)
        thread.start()
        if rank == 0:
            time.sleep(seconds)
        train(model, optimizer, range(2, 4))
        thread.join()
        return len(found)


def save_alone_and_together(directory: str) -> bool:
    """Rank 0 saves alone, and then with the others into the same directory, in one step: these return when the second
    save is there."""
    rank = int(os.environ["RANK"])
    here = Path(directory)
    with built(CONFIG) as model:
        if rank == 0:
            deepoffload.save_pretrained(model, directory, rank0_only=True)
            (here / "first").touch()
        wait_until((here / "first").exists)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)  # all ranks; no step is made
        if rank == 0:
            time.sleep(0.5)
            (here / "second").touch()
        deepoffload.save_pretrained(model, directory, rank0_only=True)
        return (here / "second").exists()
