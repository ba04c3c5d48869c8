"""Trains a small model for long under everything that makes transfers come late or in another order.

``SWAP_DIRECTORY STEPS OVERLAP``; prints JSON, last. The same program runs twice: with all memory and a quiet disk, then
with a tight budget, requests that are held back at random, pauses, and garbage collections. In both the order of the
layers changes every few steps, some layers are left out, and evaluations and readers of weights come in between.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from tests.support.memory_watch import resident_bytes

SWAP, STEPS, OVERLAP = sys.argv[1], int(sys.argv[2]), sys.argv[3]
WIDTH, DEPTH = 64, 12
PLENTY_BYTES = 64 << 20
TIGHT_SHARE = 0.3
BYTES_PER_PARAMETER = 14
DELAYS = (
    "permille=60 jitter_us=4000 seed=5;op=read permille=6 delay_ms=25 seed=6;op=write permille=6 delay_ms=40 seed=7"
)
SETTLED_SHARE = 0.3
"""Of the steps, after which memory must not grow."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Shuffled(nn.Module):
    """Layers that run in the order they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x.float().square().mean()


def order_of(step: int) -> list[int]:
    """The registered order to begin with; later a new one every seven steps, often without some layers."""
    chance = random.Random(step // 7)
    order = list(range(DEPTH))
    if step >= 14:
        chance.shuffle(order)
        order = order[: chance.randint(DEPTH - 4, DEPTH)]
    return order


def rows_of(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()


class Nuisance:
    """What may come at any time and must not matter."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._chance = random.Random(11)

    def __call__(self) -> None:
        if not self._on:
            return
        drawn = self._chance.random()
        if drawn < 0.1:
            time.sleep(self._chance.random() * 0.02)
        elif drawn < 0.12:
            gc.collect()


def look(model: Shuffled, step: int) -> list[float]:
    """A look at weights sees the finished step."""
    seen = []
    if step % 5 == 2:
        model.eval()
        with torch.no_grad():
            seen.append(model(rows_of(-step - 1), list(reversed(range(DEPTH)))).item())
        model.train()
    if step % 11 == 3:
        seen.append(model.layers[step % DEPTH].up.weight.detach().float().norm().item())
    if step % 37 == 5:
        seen.append(sum(float(value.float().sum()) for value in model.state_dict().values()))
    return seen


def soak(budget_bytes: int, delays: str | None) -> dict[str, Any]:
    """One training run. With ``delays`` it is disturbed."""
    made: list[IoEngine] = []

    def slow(**options: Any) -> IoEngine:
        made.append(IoEngine(**options, fault_script=delays))
        return made[-1]

    disk_module.IoEngine = slow  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    with deepoffload.offload_context(
        host_budget=budget_bytes, nvme_path=SWAP, precision="bf16", step_overlap=OVERLAP if delays else "none"
    ) as context:
        model = Shuffled()
    assert made, "its disk is a quick one"
    # in_backward cannot know the global norm in time, so nothing clips there, on both sides.
    clip = None if OVERLAP == "in_backward" else 0.05
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=clip)
    nuisance = Nuisance(on=delays is not None)
    seen: list[float] = []
    memory_kib: list[int] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step % 3)
        for micro in range(1 + (step % 13 == 4 and clip is not None)):
            loss = model(rows_of(2 * step + micro), order_of(step))
            nuisance()
            loss.backward()
            nuisance()
            seen.append(loss.item())
        optimizer.step()
        nuisance()
        optimizer.zero_grad()
        seen += look(model, step)
        memory_kib.append(resident_bytes() >> 10)
    seen.append(sum(float(param.detach().double().sum()) for param in model.parameters()))
    stats = deepoffload.stats(model)
    context.engine.close()  # type: ignore[union-attr]
    return {"seen": seen, "memory_kib": memory_kib, "stats": stats, "threads": threading.active_count()}


def main() -> None:
    parameters = sum(param.numel() for param in Shuffled().parameters())
    quiet = soak(PLENTY_BYTES, None)
    started = time.perf_counter()
    soaked = soak(int(parameters * BYTES_PER_PARAMETER * TIGHT_SHARE), DELAYS)
    settled = int(STEPS * SETTLED_SHARE)
    different = [
        index for index, (one, two) in enumerate(zip(quiet["seen"], soaked["seen"], strict=True)) if one != two
    ]
    print(
        json.dumps(
            {
                "seen": len(soaked["seen"]),
                "first_different": different[0] if different else None,
                "grown_kib": max(soaked["memory_kib"][settled:]) - max(soaked["memory_kib"][:settled]),
                "threads": soaked["threads"],
                "seconds": time.perf_counter() - started,
                "stats": soaked["stats"],
            }
        )
    )


if __name__ == "__main__":
    main()
