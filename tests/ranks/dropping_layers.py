"""Ranks that leave out layers, each by its own dice, with the least memory that is accepted. Runs in processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
from deepoffload.errors import BudgetError
from tests.support.inspect import watch_landings

WIDTH, VOCABULARY, STEPS, MICRO_BATCHES = 32, 96, 4, 2


class Dropping(nn.Module):
    """Six layers, of which each forward leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, tokens: Tensor, dice: random.Random) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if dice.random() > 0.4:
                x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten()) + self.nothing.sum()


def loss_of(model: nn.Module, step: int, micro_batch: int, rank: int) -> Tensor:
    """``rank``: whose data and dice these are."""
    seed = 10_000 + step * 1000 + micro_batch * 50 + rank
    torch.manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(tokens, random.Random(seed))
    return loss


def optimizer_of(model: nn.Module) -> deepoffload.CPUAdamW:
    return deepoffload.CPUAdamW(model.parameters(), lr=5e-3, max_grad_norm=0.5)


def train(transport: str, path: str) -> list[float]:
    """This rank's losses."""
    config: dict[str, Any] = {"ranks": {"timeout_s": 30, "transport": transport}, "nvme_path": path}
    config["debug"] = {"evict_always": True, "poison": True}
    host_bytes = 1 << 17
    while True:
        try:
            torch.manual_seed(7)
            with deepoffload.offload_context(config, host_budget=host_bytes) as context:
                model = Dropping()
            break
        except BudgetError as error:
            assert error.enough_bytes is not None and error.enough_bytes > host_bytes
            host_bytes = error.enough_bytes
    engine = context.engine
    assert engine is not None
    rank, optimizer, losses = dist.get_rank(), optimizer_of(model), []
    waited = watch_landings(engine)
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model, step, micro_batch, rank)
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    assert any(waited)
    assert not list(Path(path).iterdir())
    return losses


def train_alone(ranks: int) -> list[list[float]]:
    """The losses of all ranks, in one process without paging."""
    torch.manual_seed(7)
    model = Dropping()
    optimizer, losses = optimizer_of(model), [[] for _ in range(ranks)]
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(ranks):
                loss = loss_of(model, step, micro_batch, rank)
                (loss / MICRO_BATCHES).backward()
                losses[rank].append(loss.item())
        for param in model.parameters():
            param.grad.mul_(1 / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses
