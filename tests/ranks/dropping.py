"""Programs of two ranks of which one clears its gradients before the other looks at them."""

from __future__ import annotations

import os
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import RankError, UsageError
from tests.support.loops import gradients_of
from tests.support.models import mlp, rows


def _loss(model: nn.Module) -> Tensor:
    return model(rows()).square().mean()


def _equal(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


def _wrong(model: nn.Module, factor: float = 1.0) -> list[str]:
    """Names of the parameters whose gradients are not ``factor`` times those of plain PyTorch, bit for bit. All ranks
    have the same data, so the mean is what each has."""
    torch.manual_seed(3)
    plain = mlp()
    _loss(plain).backward()
    found = gradients_of(model)
    return [
        name for name, grad in gradients_of(plain).items() if grad is None or not _equal(found[name], grad * factor)
    ]


def look_and_clear(transport: str) -> list[str]:
    """Rank 0 looks at gradients and clears them. Only then rank 1 does so. Then both train on."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    context = offload_context(host_budget="32MiB", ranks={"transport": transport})
    with context:
        model = mlp()
    optimizer = CPUAdamW(model.parameters(), lr=0.0)
    found = []
    for _ in range(2):
        _loss(model).backward()
        if dist.get_rank() == 1:
            dist.barrier()
        found += _wrong(model)
        grad = next(model.parameters()).grad
        assert grad is not None
        view = grad.detach()
        del grad
        optimizer.zero_grad()
        view.zero_()  # nobody's gradient any more
        if dist.get_rank() == 0:
            dist.barrier()
    _loss(model).backward()
    _loss(model).backward()
    optimizer.step()
    found += _wrong(model, 2.0)
    optimizer.zero_grad()
    context.engine.close()
    dist.destroy_process_group()
    return found


def look_alone() -> str:
    """Rank 1 looks at a gradient that rank 0 has cleared and never looked at."""
    dist.init_process_group("gloo")
    context = offload_context(host_budget="32MiB")
    with context:
        model = mlp()
    _loss(model).backward()
    try:
        if os.environ["RANK"] == "1":
            dist.barrier()
            return str(next(model.parameters()).grad.sum())  # type: ignore[union-attr]
        model.zero_grad()
        dist.barrier()
        context.engine.close()  # serves the other rank
    except (RankError, UsageError) as error:
        return str(error)
    finally:
        with suppress(RankError):
            context.engine.close()
        dist.destroy_process_group()
    return "closed"
