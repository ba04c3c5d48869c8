"""The training loop. It is the same, line for line, for a model on disk and for a plain one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gpt.data import Batches
from gpt.ranks import Ranks

WARM_UP_SHARE = 0.2

BETAS = (0.9, 0.95)
"""Of Adam: a short memory for squares, as runs of few steps need it."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step gave. ``number`` counts from 1; ``loss`` is the mean in nats per byte."""

    number: int
    loss: float
    seconds: float


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, round(steps * WARM_UP_SHARE))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate of each of ``steps`` steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    batches: Batches,
    ranks: Ranks,
    *,
    first: int,
    steps: int,
    accumulate: int,
) -> Iterator[Step]:
    """Train from step number ``first`` (0 for a new run) to ``steps``, with ``accumulate`` batches of each rank in each
    step."""
    device = next(model.parameters()).device
    for number in range(first, steps):
        started = time.perf_counter()
        total = 0.0
        for micro in range(accumulate):
            tokens, targets = batches[(number * accumulate + micro) * ranks.world_size + ranks.rank]
            loss = model(tokens.to(device), targets.to(device)) / accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield Step(number + 1, ranks.mean(total), time.perf_counter() - started)
