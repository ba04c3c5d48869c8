"""Training with durable steps in children that are killed at random moments, compared with a run that is not.

    python -m tests.checkpoint.durable_runs DIRECTORY PLACEMENT OVERLAP PRECISION EVERY PATHS WHEN KILLS

``PRECISION``: of the weights, and after a ``+`` that of the optimizer state. ``WHEN`` children are killed:
``any`` time, soon after they have ``committed`` first, or while they are ``resuming``.

The parent imports and forks, so that a child begins at once. Children write a line for each thing that happened: the
parent sees from these lines what a child had been promised when it died.
"""

from __future__ import annotations

import gc
import random
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepoffload
from tests.checkpoint.kill_moments import KINDS, Kills, Life, life_of
from tests.checkpoint.training import snapshot
from tests.support.disks import folder_on_disk
from tests.support.models import TinyGPT, batch, next_token_loss

STEPS = 40
"""Of the whole run."""

BUDGETS: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "64MiB"},
    "half": {"host_budget": "1200KiB"},
    "optimizer": {"host_budget": "1200KiB", "offload_param": "cpu"},
    "all": {"host_budget": "700KiB"},
    "copies": {"host_budget": "2MiB", "device": "cpu", "device_budget": "600KiB", "debug": {"copies": True}},
}


Built = tuple[Any, nn.Module, torch.optim.Optimizer, Any]


def build(placement: str, overlap: str, precision: str, **more: Any) -> Built:
    """An engine, and what it trains: two groups, tied weights, dropout, a schedule, a frozen table."""
    torch.manual_seed(0)
    weights, _, state = precision.partition("+")
    said = {**BUDGETS[placement], "step_overlap": overlap, "precision": weights, **more}
    with deepoffload.offload_context(**said) as context:
        model = TinyGPT(width=64, depth=3)
    model.position.requires_grad_(False)
    decayed = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = deepoffload.CPUAdamW(groups, lr=3e-3, state_dtype=state or "fp32")
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


def live(paths: list[str], every: int, how: tuple[str, ...], tell: Callable[[str], None]) -> None:
    """A child's life: resume, train, commit, and say so."""
    tell("opens")
    engine, model, optimizer, schedule = build(*how, durability={"every": every, "path": paths})
    state = deepoffload.TrainingState(model, optimizer, schedule=schedule)
    torch.manual_seed(1)
    tell("resumes")
    first = state.resume()
    tell(f"resumed {first}")
    for number in range(first, STEPS):
        tell(f"loss {number} {step(number, model, optimizer, schedule)!r}")
        state.commit()
        tell(f"committed {number + 1}")
    tell(f"end {digest(model, optimizer)}")
    engine.close()
    tell("closed")


def check_round(
    paths: list[str], every: int, how: tuple[str, ...], kills: Kills, expected: list[float], end: int
) -> list[int]:
    """One run, through all of its deaths; the steps at which each life began."""
    promised = 0
    begins: list[int] = []
    life: Life | None = None
    while life is None or life.killed:
        life = life_of(partial(live, paths, every, how), kills.moment())
        kills.note(life)
        if "resumed" not in life.told_s:
            begins.append(begins[-1] if begins else 0)  # it died before
        for line in life.lines:
            what, *numbers = line.split()
            if what == "resumed":
                begins.append(int(numbers[0]))
                assert begins[-1] >= promised - every, f"promised {promised}, resumed {begins[-1]}"
                assert begins == sorted(begins), f"went back: {begins}"
            elif what == "loss":
                assert float(numbers[1]) == expected[int(numbers[0])], (line, expected[int(numbers[0])])
            elif what == "committed":
                promised = max(promised, int(numbers[0]))
    assert promised == STEPS and f"end {end}" in life.lines, life.lines
    return begins


def main(directory: str, how: tuple[str, str, str], every: int, num_paths: int, when: str, count: int) -> None:
    torch.set_num_threads(1)
    placement, overlap, precision = how
    expected, end = undisturbed("none", precision)
    gc.collect()
    gc.freeze()
    kills = KINDS[when](random.Random(f"{placement} {overlap} {precision} {every} {when}"), count)
    rounds: list[list[int]] = []
    while kills.left > 0 or not rounds:
        assert not rounds or when != "committed", "the run ended before it was killed so often"
        paths = [str(Path(directory) / f"{len(rounds)}-{number}") for number in range(num_paths)]
        for path in paths:
            folder_on_disk(Path(path))
        rounds.append(check_round(paths, every, how, kills, expected, end))
    print(f"lives began at {rounds}")
    print(f"killed {count} times: {dict(kills.phases)}")


if __name__ == "__main__":
    directory, placement, overlap, precision, every, paths, when, kills = sys.argv[1:]
    main(directory, (placement, overlap, precision), int(every), int(paths), when, int(kills))
