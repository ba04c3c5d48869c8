"""Models that change while several ranks train them: adapters, a new head, parameters that are unfrozen and frozen."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import BudgetError, DeepOffloadError
from tests.ranks.mean_of_ranks import scale_gradients
from tests.ranks.training_programs import Trained, digest, loss_of
from tests.support.inspect import pager_of
from tests.support.models import VOCABULARY, TinyGPT

STEPS = 8
DATA_RANKS = 2


class Adapted(nn.Module):
    """A linear layer and an adapter of rank 4 next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: TinyGPT) -> None:
    """To one linear layer of each of two blocks."""
    for block in (model.blocks[1], model.blocks[3]):
        block.mlp[0] = Adapted(block.mlp[0])


def change(model: TinyGPT, optimizer: CPUAdamW, step: int) -> None:
    """What happens before a step."""
    if step == 2:  # all of a unit, and the rest of one that is trained in part
        for block in (model.blocks[0], model.blocks[2]):
            block.requires_grad_(True)
    elif step == 3:
        model.blocks[1].requires_grad_(True)
        for name, param in model.blocks[2].named_parameters():
            param.requires_grad_("bias" in name)
    elif step == 4:  # larger than everything before
        model.head = nn.Linear(model.head.in_features, VOCABULARY, dtype=model.head.weight.dtype)
        optimizer.add_param_group({"params": list(model.head.parameters())})
    elif step == 6:
        model.blocks[0].requires_grad_(False)


def train(config: dict[str, Any], path: str | None, micro_batches: int) -> Trained:
    """Run by each rank, and by one process as the reference."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    said = {**config, "nvme_path": path} if path is not None and config.get("nvme_budget") else config
    context = offload_context(said)
    with context:
        model = TinyGPT(dropout=0.0)
        for name, param in model.named_parameters():
            param.requires_grad_("blocks.2" in name and "bias" in name)
    torch.manual_seed(12)
    add_adapters(model)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    found = Trained()
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        change(model, optimizer, step)
        for micro in range(micro_batches):
            for reader in [rank] if world_size > 1 else range(DATA_RANKS):
                loss = loss_of(model, "gpt", 10_000 * step + 100 * micro + reader)
                (loss / micro_batches).backward()
                found.losses.append(float(loss.detach()))
        if world_size == 1:
            scale_gradients(model, 1 / DATA_RANKS)
        optimizer.step()
        optimizer.zero_grad()
        found.norms.append(optimizer.grad_norm)
    found.weights = {name: digest(value) for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found.first_gradients[f"{number}.{key}"] = digest(value)
    context.engine.close()
    return found


def with_frozen_blocks() -> tuple[TinyGPT, Any]:
    """A model that trains its embeddings and its head alone, and its engine."""
    torch.manual_seed(11)
    with offload_context(host_budget="64MiB") as context:
        model = TinyGPT(dropout=0.0)
        model.blocks.requires_grad_(False)
    return model, context.engine


def differ(how: str) -> list[str]:
    """What every rank raises where ranks change their models otherwise."""
    rank = int(os.environ["RANK"])
    model, engine = with_frozen_blocks()
    found = []

    def step() -> str:
        try:
            optimizer = CPUAdamW(model.parameters(), lr=1e-2)
            loss_of(model, "gpt", 7 + rank).backward()
            optimizer.step()
        except DeepOffloadError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    if how == "values":
        torch.manual_seed(rank)
        add_adapters(model)
        found.append(step())
        torch.manual_seed(3)
        for block in (model.blocks[1], model.blocks[3]):  # what has come is ordinary still
            block.mlp[0].down.reset_parameters()
            block.mlp[0].up.reset_parameters()
        found.append(step())
        found.append(step())
        torch.manual_seed(4)
        model.extra = nn.ModuleList([nn.Linear(48, 48), nn.Linear(3000, 3000)])  # more than the budget of a rank
        found.append(step())
        model.extra = model.extra[0]
        found.append(step())
        engine.close()
    elif how == "one adds":
        if rank == 1:
            add_adapters(model)
        found.append(step())
    else:
        model.blocks[1 + rank].requires_grad_(True)
        found.append(step())
    return found


def lack_room_once() -> tuple[str, list[float]]:
    """Rank 1 has no room when adapters come, and has some when the program tries again. What it raised, and losses."""
    rank = int(os.environ["RANK"])
    model, engine = with_frozen_blocks()
    add_adapters(model)
    tiers: Any = pager_of(model).tiers
    create, error = tiers.create, ""

    def fail(*arguments: Any) -> None:
        tiers.create = create
        raise BudgetError("a view takes the room")

    if rank == 1:
        tiers.create = fail
    try:
        CPUAdamW(model.parameters(), lr=1e-2)
    except BudgetError as raised:
        error = f"{raised}"
    optimizer, losses = CPUAdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = loss_of(model, "gpt", 7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    engine.close()
    return error, losses
