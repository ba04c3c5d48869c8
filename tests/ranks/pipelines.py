"""Stages of a pipeline, each of one process with its own budget: trained in memory and paged, and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import DeepOffloadError
from tests.support.inspect import is_paged
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import CONTEXT, VOCABULARY, Block, batch
from tests.support.paging import EVICTING, TIGHT, Paging, Setting
from tests.support.rank_processes import own_group

WIDTH, DEPTH, MICRO_BATCHES, STEPS = 48, {1: 2, 3: 1}, 4, 5
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
TWO_STAGES = ("interleaved", "zero bubble")
"""Schedules for which each process has two."""
BUDGET = "1MiB"
"""Of one process of two that have a stage together: less than it takes."""
SETTINGS = {"tight": TIGHT, "evicting": EVICTING}


def rank() -> int:
    return int(os.environ["RANK"])


class Stage(nn.Module):
    """A part of a GPT: the first one has the embedding, the last one the head.

    Args:
        number: of the stage.
        last: the number of the last one.
    """

    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == last
        if self.first:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block(WIDTH, 4, 0.1) for _ in range(DEPTH.get(last, 1))])
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def share_of_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The schedule then need not divide the gradients."""
    return loss_of(logits, tokens) / MICRO_BATCHES


class LocalPaging(Paging):
    """Makes models that this process has for itself."""

    @contextmanager
    def context(self, setting: Setting, host_budget: int, **config: Any) -> Iterator[offload_context]:
        with super().context(setting, host_budget, ranks="local", **config) as context:
            yield context


def stages_of(schedule: str) -> list[int]:
    """The numbers of this process's stages."""
    return [rank(), rank() + 2] if schedule in TWO_STAGES else [rank()]


def builds(schedule: str) -> list[Callable[[], nn.Module]]:
    numbers = stages_of(schedule)
    last = 2 * len(numbers) - 1
    return [partial(Stage, number, last) for number in numbers]


def clip_over_stages(models: list[nn.Module], limit: float) -> Tensor:
    """The norm of all stages, by torch's functions."""
    params = [param for model in models for param in model.parameters()]
    own = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    squares = own.square()
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(params, limit, squares.sqrt())
    return squares


def trained(models: list[nn.Module], optimizers: list[Any], schedule: str, how: str) -> tuple[Any, list[float]]:
    """What five steps show, and the faults of each. ``how``: ``looked at``: the schedule divides the gradients, and
    they are clipped over all stages; ``given``: the loss is divided."""
    numbers = stages_of(schedule)
    stages = [
        PipelineStage(model, number, 2 * len(models), torch.device("cpu"))
        for model, number in zip(models, numbers, strict=True)
    ]
    looks = how == "looked at"
    runs = SCHEDULES[schedule](
        stages if schedule in TWO_STAGES else stages[0],
        MICRO_BATCHES,
        loss_fn=loss_of if looks else share_of_loss,
        scale_grads=looks,
    )
    seen: list[Any] = []
    faults: list[float] = []
    for step in range(STEPS):
        before = faults_of(models)
        torch.manual_seed(10 * step + rank())
        tokens = batch(step, rows=2 * MICRO_BATCHES)
        losses: list[Tensor] = []
        given = (tokens,) if rank() == 0 else ()
        named = {"target": tokens, "losses": losses} if rank() == 1 else {}
        runs.step(*given, **named)
        if looks:
            seen.append(clip_over_stages(models, 0.5))
        if step == 0:
            seen.append([gradients_of(model) for model in models])
            before = faults_of(models)  # looking at all gradients has cost some
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append([loss.detach() for loss in losses])
        faults.append(faults_of(models) - before)
    seen.append([weights_of(model) for model in models])
    return seen, faults


def faults_of(models: list[nn.Module]) -> float:
    return sum(deepoffload.stats(model)["faults"] for model in models if is_paged(model))


def train_stages(file: str, folder: str, cells: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Each cell (schedule, setting, how) in memory, by torch's AdamW, and paged, by the same class: equal bits.

    Returns:
        The faults of each step, and what was evicted.
    """
    own_group(file)
    paging, found = LocalPaging(Path(folder)), []
    for schedule, setting, how in cells:
        settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
        models = []
        for build in builds(schedule):
            torch.manual_seed(rank())
            models.append(build())
        plain = [torch.optim.AdamW(model.parameters(), **settings) for model in models]
        expected, _ = trained(models, plain, schedule, how)
        models = [
            paging.build(build, SETTINGS[setting], seed=rank(), key=(schedule, number))
            for number, build in enumerate(builds(schedule))
        ]
        paged = [deepoffload.paged(torch.optim.AdamW, model.parameters(), **settings) for model in models]
        got, faults = trained(models, paged, schedule, how)
        assert_same_bits(expected, got, f"rank {rank()}, {schedule}, {setting}, {how}")
        evictions = min(deepoffload.stats(model)["evictions"] for model in models)
        found.append({"faults": faults, "evictions": evictions})
    dist.barrier()
    return found


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def forget_a_reduction(file: str, path: str) -> dict[str, str]:
    """What is said where gradients of several processes should have been added up; the model trains afterwards."""
    own_group(file)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    said: dict[str, Any] = {"host_budget": "8MiB", "nvme_path": path}

    def build(**others: Any) -> nn.Module:
        torch.manual_seed(0)
        with offload_context(ranks="local", **said, **others):
            return Stage(0, 0)

    model = build()
    tokens = batch(0)
    wrong: dict[str, Callable[[], object]] = {
        "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(model)(tokens),
        "fully_shard": lambda: fully_shard(model, mesh=mesh["dp"]),
        "two dimensions": lambda: build(mesh=mesh),
        "one dimension": lambda: build(mesh=mesh["dp"]),
        "group": lambda: build(group=mesh.get_group("dp")),
    }
    found = {name: error_of(call) for name, call in wrong.items()}
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    torch.manual_seed(0)
    plain = Stage(0, 0)
    torch.manual_seed(1)
    loss_of(plain(tokens), tokens).backward()
    deepoffload.CPUAdamW(plain.parameters(), lr=1e-2).step()
    assert_same_bits(weights_of(plain), weights_of(model))
    dist.barrier()
    return found


def train_replicas(file: str, folder: str) -> dict[str, Any]:
    """Two replicas of a pipeline of two stages: in memory with gradients that are averaged by hand, and paged by the
    processes of each stage together. All is equal within rounding: ranks add up the gradients of each micro-batch, and
    a step its sums."""
    own_group(file)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    found: list[Any] = []
    said = {"host_budget": BUDGET, "nvme_path": folder, "debug": {"poison": True, "evict_always": True}}
    for is_paged_one in (False, True):
        torch.manual_seed(number)
        with offload_context(mesh=mesh["dp"], **said) if is_paged_one else nullcontext():
            model = Stage(number, 1)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, eps=1e-2)  # so that rounding stays rounding
        group = mesh.get_group("pp")
        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
        runs = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=share_of_loss, scale_grads=False)
        losses: list[Tensor] = []
        for step in range(2):
            torch.manual_seed(10 * step + rank())
            tokens = batch(2 * step + replica, rows=2 * MICRO_BATCHES)
            given = (tokens,) if number == 0 else ()
            runs.step(*given, **({"target": tokens, "losses": losses} if number == 1 else {}))
            if not is_paged_one:
                for param in model.parameters():
                    assert param.grad is not None
                    dist.all_reduce(param.grad, group=mesh.get_group("dp"))
                    param.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        found.append(([loss.detach() for loss in losses], weights_of(model)))
    (losses, weights), (paged_losses, paged_weights) = found
    for one, other in zip((*losses, *weights.values()), (*paged_losses, *paged_weights.values()), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (one - other).abs().max()
    evictions = deepoffload.stats(model)["evictions"]
    dist.barrier()
    return {"evictions": evictions}
