"""What deepoffload itself costs: seconds per use of a unit, per landed gradient, per state piece, per decision.

Measured on a model so small that its operators take no time worth the name: without paging, in memory, and on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from deepoffload.config import Config, Precision, StepOverlap
from deepoffload.optim.adam import CPUAdamW
from deepoffload.runtime.announce import silently
from deepoffload.runtime.context import offload_context

LAYERS, WIDTH = 64, 64
IN_MEMORY_BYTES, ON_DISK_BYTES = 64 << 20, 3 << 20
"""Budgets: more than the model takes (some 5 MiB), and less."""
ROUNDS, ROUNDS_ON_DISK = 9, 6
DEFAULT_PLAN_S = 2e-4


@dataclass(frozen=True)
class Overheads:
    """Seconds. ``visit_s``: entering and leaving a unit's modules. ``landing_s``: one parameter's gradient, from its
    hooks to its place. ``piece_s``: one piece of optimizer state. ``plan_s``: deciding at one event what moves next,
    where something does."""

    visit_s: float
    landing_s: float
    piece_s: float
    plan_s: float


def measure_overheads(nvme_path: str | None = None) -> Overheads:
    """Takes about a second. Without a path ``plan_s`` is a usual value.

    Raises:
        ConfigError: the path is missing or not writable.
    """
    plain, x = _model().bfloat16(), torch.ones(1, WIDTH, dtype=torch.bfloat16)
    bare = []
    for _ in range(ROUNDS):
        bare.append(_step(plain, x, lambda: None))
        for param in plain.parameters():
            param.grad = None
    # the least of each: what else the machine does only ever adds
    base = [min(column) for column in zip(*bare, strict=True)]
    in_memory = Config(host_budget=IN_MEMORY_BYTES, precision=Precision.BF16, step_overlap=StepOverlap.NONE)
    near = _paged(in_memory, x, ROUNDS)
    forward_s, backward_s, update_s = (max(0.0, a - b) for a, b in zip(near, base, strict=True))
    plan_s = DEFAULT_PLAN_S
    if nvme_path is not None:
        on_disk = replace(in_memory, host_budget=ON_DISK_BYTES, nvme_path=(nvme_path,))
        plan_s = max(0.0, sum(_paged(on_disk, x, ROUNDS_ON_DISK)) - sum(near)) / (3 * LAYERS)
    return Overheads(forward_s / LAYERS, backward_s / (2 * LAYERS), update_s / LAYERS, plan_s)


def _paged(config: Config, x: torch.Tensor, rounds: int) -> list[float]:
    """Least seconds of forward, backward and update, without waiting for the disk."""
    with silently(), offload_context(config, ranks="local") as context:
        model = _model()
    engine = context.engine
    if engine is None:
        raise RuntimeError("an offload_context has no engine")
    optimizer = CPUAdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(rounds):
        waited = engine.stats()["wait_s"]
        forward_s, backward_s, update_s = _step(model, x, optimizer.step)
        optimizer.zero_grad()
        times.append((forward_s, backward_s, update_s - (engine.stats()["wait_s"] - waited)))
    engine.close("its overhead is known")
    least = min(times, key=sum)
    return list(least)


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _step(model: nn.Module, x: torch.Tensor, update: Callable[[], object]) -> tuple[float, float, float]:
    started = time.perf_counter()
    loss = model(x).sum()
    after_forward = time.perf_counter()
    loss.backward()
    after_backward = time.perf_counter()
    update()
    return after_forward - started, after_backward - after_forward, time.perf_counter() - after_backward
