"""What ranks do in the tests of how an engine is set up and ends."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import deepoffload
from deepoffload.errors import BudgetError, DeepOffloadError, PlacementError
from tests.support.inspect import pager_of
from tests.support.rank_processes import LONG_S, SOON_S

RANKS = {"timeout_s": LONG_S}


def rank() -> int:
    return int(os.environ["RANK"])


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except (DeepOffloadError, OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def build(*, seed: int = 0, width: int = 32, fail: bool = False, **said: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    with deepoffload.offload_context(**{"host_budget": "8MiB", "ranks": RANKS, **said}) as context:
        model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
        if fail:
            raise OSError("the weights of the encoder cannot be read")
    return model, context.engine


def build_otherwise(what: str, path: str) -> tuple[str, int]:
    """Rank 1 builds with something else. Afterwards all ranks can still build and train.

    Returns:
        What the first model was refused with, and how many threads there are in the end.
    """
    others: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "width": {"width": 48},
        "budget": {"host_budget": "9MiB"},
        "path": {"nvme_path": os.path.join(path, "missing")},
        "fail": {"fail": True},
    }
    first = {"nvme_path": path} if what == "path" else {}
    said = error_of(build, **(others[what] if rank() == 1 else first))
    model, engine = build()
    train(model, 1)
    engine.close()
    return said, threading.active_count()


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    losses = []
    for step in range(steps):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank()))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build_what_cannot_be(path: str) -> list[str]:
    """What each model is refused with of which rank 1 says something else than rank 0."""
    differing: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"nvme_path": path}, {}),
        ({}, {"config": {"zero_optimization": {"stage": 2}}}),
        ({}, {"config": {"checkpoint": {"load_universal": True}}}),
        ({}, {"config": {"scheduler": {"type": "WarmupLR"}}}),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, {}),
        ({}, {"aio": {"queue_depth": 4}, "host_budget": "much"}),
    ]
    said = [error_of(build, **pair[rank()]) for pair in differing]
    config = {"ranks": RANKS, "optimizer": {"type": "Adam", "params": {"lr": 1e-2 if rank() == 0 else -1.0}}}
    return [*said, error_of(deepoffload.initialize, model=nn.Linear(4, 4), config=config)]


def raise_the_budget(budget: str, **said: Any) -> tuple[str, int | None, list[float]]:
    """Too small for the model; what the refusal names is enough."""
    try:
        build(host_budget=budget, **said)
    except BudgetError as error:
        model, engine = build(host_budget=error.enough_bytes, **said)
        losses = train(model, 2)
        engine.close()
        return str(error), error.enough_bytes, losses
    raise AssertionError("it fits")


def train_for_itself() -> tuple[list[float], int]:
    """Each rank has its own model, in the middle of a group."""
    dist.init_process_group("gloo")
    model, engine = build(seed=rank(), ranks="local")
    dist.barrier()
    losses = train(model, 3)
    engine.close()
    return losses, engine.ranks.world_size


def train_alone() -> list[float]:
    """The same without a group."""
    os.environ.pop("WORLD_SIZE")
    model, engine = build(seed=rank())
    losses = train(model, 3)
    engine.close()
    return losses


def close_early() -> list[str]:
    """The last rank makes a step more than the others: four times, and with three ranks once where rank 0 closes when
    the others have raised what comes of it."""
    dist.init_process_group("gloo")
    said = []
    for closes_late in [False] * 4 + [True] * (dist.get_world_size() - 2):
        model, engine = build()
        train(model, 2)
        if closes_late and rank() == 0:
            dist.barrier()
        said.append(error_of(train, model, 1) if rank() == dist.get_world_size() - 1 else error_of(engine.close))
        if closes_late and rank() != 0:
            dist.barrier()
        engine.close()
    return said


def leave_the_last_open() -> tuple[list[int], list[float], list[float]]:
    """Two engines are closed. Of two others the models are forgotten, by rank 0 first; rank 1 goes on to use one.
    Nobody closes the last engine: the end of the process does.

    Returns:
        How many threads there are after each of those before; what the two models that are forgotten have shown; and
        the losses of the last.
    """
    threads, forgotten = [], []
    for _ in range(2):
        model, engine = build()
        train(model, 1)
        engine.close()
        del model, engine
        gc.collect()
        threads.append(count_threads())
    for _ in range(2):
        forgotten.append(forget())
        threads.append(wait_for(lambda: count_threads() == threads[0]) and count_threads())
    return threads, forgotten, train(build()[0], 2)


def forget() -> float:
    """Rank 0 evaluates and drops its model, then rank 1."""
    model, engine = build()
    train(model, 2)
    arena = weakref.ref(pager_of(model).tiers.arena)
    if rank() == 1:
        dist.barrier()
    with torch.no_grad():
        loss = float(model(torch.ones(2, 16)).sum())
    if rank() == 0:
        del model, engine
        dist.barrier()
    model = engine = None
    assert wait_for(lambda: arena() is None), "its memory is kept"
    return loss


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def wait_for(over: Callable[[], bool]) -> bool:
    """Whether it comes to be so within a time that any machine has."""
    until = time.monotonic() + SOON_S
    while not over() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return over()


def fail_between_steps() -> tuple[str, str]:
    """An error of the program closes the engine of rank 1, as a program does that cleans up. Rank 0 trains on; with
    another model it has another error, half a second later."""
    found = []
    for trains_on in (True, False):
        model, engine = build()

        def run(model: nn.Module = model, engine: Any = engine, trains_on: bool = trains_on) -> None:
            try:
                train(model, 2)
                if rank() == 1:
                    raise ValueError("the batch is empty")
                if not trains_on:
                    time.sleep(0.5)  # its thread hears of the other one
                    raise ValueError("the batch is torn")
                train(model, 2)
            finally:
                engine.close()

        found.append(error_of(run))
    return found[0], found[1]


def be_an_engine() -> dict[str, Any]:
    """DeepSpeed's surface."""
    torch.manual_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "host_budget": "8MiB",
        "ranks": RANKS,
    }
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.arange(12.0).reshape(12, 1).expand(12, 4).contiguous())
    engine, _, loader, _ = deepoffload.initialize(model=model, config=config, training_data=data)
    torch.manual_seed(rank())
    seen = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        seen.append([int(row[0]) for (rows,) in loader for row in rows])
    losses = []
    for _, (rows,) in zip(range(2), loader, strict=False):
        loss = engine(rows).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    facts = {
        "sizes": (engine.world_size, engine.dp_world_size, engine.train_batch_size(), engine.micro_steps),
        "ranks": (engine.global_rank, engine.local_rank),
        "seen": seen,
        "updates": engine.global_steps,
        "norm": engine.get_global_grad_norm(),
        "late": error_of(add_a_layer, engine.module),
        "stats": {key: engine.stats()[key] for key in ("rank", "world_size", "mixed_rounds", "nudges")},
        "bytes": all(engine.stats()[key] > 0 for key in ("rounds", "gather_bytes", "reduce_bytes")),
    }
    facts["steps without backward"] = step_without_backward(engine, rows)
    engine.destroy()
    return facts | {"warned": warnings_of(lambda: read_a_stream(config))}


def step_without_backward(engine: Any, rows: torch.Tensor) -> tuple[str, int, int]:
    """First no rank has made one, then rank 1 has."""
    del engine.module.adapter
    engine.set_gradient_accumulation_boundary(True)
    updates, said = engine.global_steps, error_of(engine.step)
    refused = engine.global_steps - updates
    if rank() == 1:
        engine.backward(engine(rows).square().mean())
    engine.step()
    return said, refused, engine.global_steps - updates


class Stream(IterableDataset[torch.Tensor]):
    """Does not look which rank draws from it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4, 4))


def read_a_stream(config: dict[str, Any]) -> None:
    torch.manual_seed(7)
    engine, _, loader, _ = deepoffload.initialize(model=nn.Linear(4, 1), config=config, training_data=Stream())
    assert [len(rows) for rows in loader] == [2, 2]
    engine.destroy()


def warnings_of(call: Callable[[], None]) -> list[str]:
    """What ``call`` warns of in the log."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepoffload")
    logger.addHandler(handler)
    try:
        call()
    finally:
        logger.removeHandler(handler)
    return said


def add_a_layer(model: nn.Module) -> None:
    model.adapter = nn.Linear(4, 4)
    model(torch.zeros(1, 4))


def save(folder: str, how: str) -> list[float]:
    """All ranks save, or the first alone while the other goes on."""
    model, engine = build()
    train(model, 1)
    if how == "all" or rank() == 0:
        deepoffload.save_pretrained(model, folder, rank0_only=how != "all")
    losses = train(model, 1)
    engine.close()
    return losses


def fork_in_the_middle() -> tuple[int, list[float]]:
    """A child process ends with an error, as an interpreter ends: nobody mistakes it for the rank."""
    model, engine = build()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, 1, optimizer)
    child = os.fork()
    if child == 0:
        sys.last_value = ValueError("the child's")
        atexit._run_exitfuncs()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    losses = train(model, 2, optimizer)
    engine.close()
    return os.waitstatus_to_exitcode(status), losses


def build_with_what_is_named(path: str) -> tuple[int, list[tuple[int, str]]]:
    """A model of whose weights the program keeps views is built with the budget that each refusal names. Returns the
    budget with which it is there, and the refusals."""
    budget_bytes, refused = 8192, list[tuple[int, str]]()
    for _ in range(5):
        try:
            with deepoffload.offload_context(host_budget=budget_bytes, nvme_budget="64MiB", nvme_path=path):
                layers = [nn.Linear(16, 16)]
                view = layers[0].weight.detach()
                layers.append(nn.Linear(16, 16))
                del view
            return budget_bytes, refused
        except BudgetError as error:
            assert error.enough_bytes is not None
            budget_bytes = error.enough_bytes
            if not isinstance(error, PlacementError):
                refused.append((budget_bytes, str(error)))
    return 0, refused
