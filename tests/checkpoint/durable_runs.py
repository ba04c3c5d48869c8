"""Training with durable steps in children that are killed at random moments, compared with a run that is not.

    python -m tests.checkpoint.durable_runs DIRECTORY PLACEMENT OVERLAP PRECISION EVERY KILLS [PATHS]

``KILLS`` with a ``+``: each child is killed soon after its first commit.

The parent imports and forks, so that a child begins at once. Children write a line for each thing that happened: the
parent sees from these lines what a child had been promised when it died.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import deepoffload
from tests.checkpoint.training import snapshot
from tests.support.models import TinyGPT, batch, next_token_loss

STEPS = 40
"""Of the whole run."""

LIMIT_S = 60.0
"""A child that takes longer is stuck."""

BUDGETS: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "64MiB"},
    "half": {"host_budget": "1200KiB"},
    "optimizer": {"host_budget": "1200KiB", "offload_param": "cpu"},
    "all": {"host_budget": "700KiB"},
}


Built = tuple[Any, nn.Module, torch.optim.Optimizer, Any]


def build(placement: str, overlap: str, precision: str, **more: Any) -> Built:
    """An engine, and what it trains: two groups, tied weights, dropout, a schedule, a frozen table."""
    torch.manual_seed(0)
    said = {**BUDGETS[placement], "step_overlap": overlap, "precision": precision, **more}
    with deepoffload.offload_context(**said) as context:
        model = TinyGPT(width=64, depth=3)
    model.position.requires_grad_(False)
    decayed = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.dim() == 1]
    optimizer = deepoffload.CPUAdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    return context.engine, model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def step(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> float:
    loss = next_token_loss(model, batch(number))
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(loss.detach())


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of weights, masters and moments."""
    found = snapshot(model, optimizer)
    values = [*found["weights"].values()]
    for entry in found["state"].values():
        values += [value for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)]
    return zlib.crc32(b"".join(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in values))


def undisturbed(*how: str) -> tuple[list[float], int]:
    """The losses of a run in memory alone, and what it ends with."""
    engine, model, optimizer, schedule = build("host", *how)
    torch.manual_seed(1)
    losses = [step(number, model, optimizer, schedule) for number in range(STEPS)]
    end = digest(model, optimizer)
    engine.close()
    return losses, end


def live(paths: list[str], every: int, told: int, *how: str) -> None:
    """A child's life: resume, train, commit, and say so."""

    def tell(line: str) -> None:
        os.write(told, (line + "\n").encode())

    engine, model, optimizer, schedule = build(*how, durability={"every": every, "path": paths})
    state = deepoffload.TrainingState(model, optimizer, schedule=schedule)
    torch.manual_seed(1)
    first = state.resume()
    tell(f"resumed {first}")
    for number in range(first, STEPS):
        tell(f"loss {number} {step(number, model, optimizer, schedule)!r}")
        state.commit()
        tell(f"committed {number + 1}")
    tell(f"read {engine.stats()['disk_bytes_read']:.0f}")
    tell(f"end {digest(model, optimizer)}")
    engine.close()
    tell("closed")


class Moment(NamedTuple):
    """When a child dies: so many seconds after it was made, or after its first commit."""

    seconds: float
    after_commit: bool = False


def lives(paths: list[str], every: int, how: tuple[str, ...], moments: Iterator[Moment]) -> Iterator[list[str]]:
    """What each child told before it died, until one has come to the end."""
    told = b""
    while b"closed" not in told:
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                live(paths, every, writes, *how)
            finally:
                os._exit(1)
        os.close(writes)
        told, moment = b"", next(moments)
        until = time.monotonic() + (LIMIT_S if moment.after_commit else moment.seconds)
        waits = moment.after_commit
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            if not select.select([reads], [], [], left_s)[0]:
                continue
            more = os.read(reads, 1 << 16)
            if not more:
                break  # it has come to its end
            told += more
            if waits and b"committed" in told:
                waits, until = False, time.monotonic() + moment.seconds
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reads, "rb") as rest:
            told += rest.read()
        yield told.decode().splitlines()


def check_round(
    paths: list[str], every: int, how: tuple[str, ...], moments: Iterator[Moment], expected: list[float], end: int
) -> list[int]:
    """One run, through all of its deaths; the steps at which each life began."""
    promised = 0
    begins: list[int] = []
    for lines in lives(paths, every, how, moments):
        if not any(line.startswith("resumed") for line in lines):
            begins.append(begins[-1] if begins else 0)  # it died before
        for line in lines:
            what, *numbers = line.split()
            if what == "resumed":
                begins.append(int(numbers[0]))
                assert begins[-1] >= promised - every, f"promised {promised}, resumed {begins[-1]}"
                assert begins == sorted(begins), f"went back: {begins}"
            elif what == "loss":
                assert float(numbers[1]) == expected[int(numbers[0])], (line, expected[int(numbers[0])])
            elif what == "committed":
                promised = max(promised, int(numbers[0]))
    assert promised == STEPS and f"end {end}" in lines, lines
    return begins


def main(directory: str, placement: str, overlap: str, precision: str, every: int, kills: str, num_paths: int) -> None:
    torch.set_num_threads(1)
    dice = random.Random(f"{placement} {overlap} {precision} {every}")
    expected, end = undisturbed("none", precision)
    gc.collect()
    gc.freeze()
    soon, left = kills.startswith("+"), int(kills)

    def moments() -> Iterator[Moment]:
        nonlocal left
        while left > 0:
            left -= 1
            yield Moment(dice.uniform(0.0, 0.05), True) if soon else Moment(dice.uniform(0.0, 0.5), left % 2 == 0)
        while True:
            yield Moment(LIMIT_S)

    rounds = []
    while left > 0 or not rounds:
        paths = [str(Path(directory) / f"{len(rounds)}-{number}") for number in range(num_paths)]
        for path in paths:
            os.mkdir(path)
        rounds.append(check_round(paths, every, (placement, overlap, precision), moments(), expected, end))
        if soon:
            assert left == 0, "the run ended before it was killed so often"
    print(f"killed {kills} times; lives began at {rounds}")


if __name__ == "__main__":
    directory, placement, overlap, precision, every, kills, *more = sys.argv[1:]
    main(directory, placement, overlap, precision, int(every), kills, int(more[0]) if more else 1)
