"""A long training whose ranks pause, change the order of their layers, and evaluate alone: the losses of one process,
and no growth of memory. ``python -m tests.ranks.soak --steps 1000`` makes so many steps."""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepoffload
from deepoffload import CPUAdamW, offload_context
from tests.ranks.mean_of_ranks import MeanOfRanks
from tests.ranks.training_programs import MODELS, loss_of
from tests.support.rank_processes import ENDS_WITHIN_S, values_of

GROWTH_BYTES = 8 << 20
"""How much more memory a process may take at the end than after the first third. A short run still touches pages for
the first time."""
ARENA_GROWTH_BYTES = 1 << 20
"""The same of the arena, where some more blocks may be in memory."""


@dataclass(frozen=True)
class Soak:
    """One run.

    Attributes:
        pause_s: the longest pause before a layer; one of fifty is twenty times as long.
        step_overlap: of the ranks. With "speculative" some steps clip and others do not.
    """

    steps: int = 1000
    world_size: int = 2
    transport: str = "memory"
    pause_s: float = 0.002
    seed: int = 0
    step_overlap: str = "deferred"


@dataclass
class Seen:
    """What a rank has seen.

    Attributes:
        evaluated: losses of evaluations, with the step.
        memory: bytes of the process and of the arena, after a third of the steps and at the end.
    """

    losses: list[float] = field(default_factory=list)
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)


class Shuffled(nn.Module):
    """A GPT whose layers come in another order, each after a pause."""

    def __init__(self, model: nn.Module, order: Sequence[int], pauses_s: Sequence[float]) -> None:
        super().__init__()
        self.model, self.order, self.pauses_s = [model], order, pauses_s  # in a list: it is no child

    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model[0]
        x = model.embedding(tokens) + model.position[: tokens.shape[1]]
        for number, pause_s in zip(self.order, self.pauses_s, strict=True):
            time.sleep(pause_s)
            x = model.blocks[number](x)
        return model.head(model.norm(x))


def _called(soak: Soak, model: Any, step: int, reader: int, alone: bool) -> nn.Module:
    """The model as rank ``reader`` calls it: its own order in some steps, in others that of all."""
    all_ranks, own = random.Random(f"{soak.seed} {step}"), random.Random(f"{soak.seed} {step} {reader}")
    order = list(range(len(model.blocks)))
    (own if all_ranks.random() < 0.3 else all_ranks).shuffle(order)
    pauses_s = [own.random() * soak.pause_s * (20 if own.random() < 0.02 else 1) for _ in order]
    return Shuffled(model, order, [0.0] * len(order) if alone else pauses_s)


def _evaluate(soak: Soak, model: nn.Module, step: int, ranks: Sequence[int], seen: Seen) -> None:
    """In some steps one rank evaluates. The others wait in a barrier of the program's, or go on."""
    dice = random.Random(f"{soak.seed} evaluation {step}")
    if dice.random() > 0.1:
        return
    reader, waits = dice.randrange(soak.world_size), dice.random() < 0.5
    if reader in ranks:
        with torch.no_grad():
            seen.evaluated.append((step, float(loss_of(model, "gpt", 5 + step))))
    if waits and len(ranks) < soak.world_size:
        dist.barrier()


def train(soak: Soak, nvme_path: str) -> Seen:
    """Run by each rank, and by one process as the reference."""
    rank, alone = int(os.environ["RANK"]), os.environ["WORLD_SIZE"] == "1"
    ranks = range(soak.world_size) if alone else [rank]
    torch.manual_seed(5)
    if alone:
        context = offload_context(host_budget="64MiB", gradient_dtype="fp32")
    else:
        context = offload_context(
            {
                "host_budget": f"{2 * soak.world_size}MiB",
                "nvme_path": nvme_path,
                "nvme_budget": "64MiB",
                "step_overlap": soak.step_overlap,
            },
            ranks={"transport": soak.transport},
        )
    with context:
        model: Any = MODELS["gpt"]()
    clip = None if soak.step_overlap == "in_backward" else 1.0
    optimizer = CPUAdamW(model.parameters(), lr=1e-4, max_grad_norm=clip)
    mean, seen = MeanOfRanks(model, soak.world_size), Seen()
    for step in range(soak.steps):
        for reader in ranks:
            loss = loss_of(_called(soak, model, step, reader, alone), "gpt", 10 * step + reader)
            loss.backward()
            if alone:
                mean.backward_is_over()
            seen.losses.append(float(loss.detach()))
        if alone:
            mean.make()
        if soak.step_overlap == "speculative":
            optimizer.max_grad_norm = 0.01 if step % 10 == 7 else 1e6
        optimizer.step()
        optimizer.zero_grad()
        _evaluate(soak, model, step, ranks, seen)
        if step + 1 in (soak.steps // 3, soak.steps):
            gc.collect()
            seen.memory.append((_resident_bytes(), deepoffload.stats(model)["host_bytes"]))
    seen.stats = dict(deepoffload.stats(model))
    context.engine.close()
    return seen


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def check(soak: Soak, nvme_path: Path, limit_s: float = ENDS_WITHIN_S) -> list[Seen]:
    """Train on several ranks and in one process, and compare. Returns what the ranks have seen."""
    (expected,) = values_of(train, 1, soak, str(nvme_path), limit_s=limit_s)
    ranks: list[Seen] = values_of(train, soak.world_size, soak, str(nvme_path), limit_s=limit_s)
    for rank, got in enumerate(ranks):
        assert got.losses == expected.losses[rank :: soak.world_size], f"losses of rank {rank}"
        (early_bytes, early_arena), (late_bytes, late_arena) = got.memory
        assert late_bytes - early_bytes < GROWTH_BYTES, f"rank {rank} grows: {got.memory}"
        assert late_arena - early_arena < ARENA_GROWTH_BYTES, f"the arena of rank {rank} fills: {got.memory}"
    assert sorted(found for got in ranks for found in got.evaluated) == sorted(expected.evaluated)
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=("memory", "group"), default="memory")
    parser.add_argument("--step-overlap", choices=("deferred", "speculative", "in_backward"), default="deferred")
    chosen = parser.parse_args()
    soak = Soak(chosen.steps, chosen.ranks, chosen.transport, seed=chosen.seed, step_overlap=chosen.step_overlap)
    with tempfile.TemporaryDirectory() as nvme_path:
        begin = time.monotonic()
        for rank, seen in enumerate(check(soak, Path(nvme_path), limit_s=3600.0)):
            (early_bytes, _), (late_bytes, _) = seen.memory
            told = ("rounds", "mixed_rounds", "nudges", "rounds_answered", "speculated", "rolled_back")
            kept = {key: seen.stats[key] for key in told if key in seen.stats}
            print(f"rank {rank}: grew by {(late_bytes - early_bytes) >> 10} KiB, {kept}")
        print(f"{chosen.steps} steps of {chosen.ranks} ranks: equal, in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
