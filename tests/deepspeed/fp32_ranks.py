"""What ranks do with ``safe_get_*`` and ``safe_set_*``, in separate processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deepoffload.deepspeed as deepspeed
from deepoffload import CPUAdamW, offload_context
from deepoffload.deepspeed import utils
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import digest, rank
from tests.support.models import mlp, rows

KEYS = ("exp_avg", "exp_avg_sq")


def trained(precision: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with offload_context({"host_budget": "16MiB", "precision": precision, "gradient_dtype": "fp32"}):
        model = mlp()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    loss = model(rows().to(next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of_all(model: Any) -> list[str]:
    """Weights, gradients and state, of every parameter."""
    found = []
    for param in model.parameters():
        values = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_grad(param)]
        values += [utils.safe_get_full_optimizer_state(param, key) for key in KEYS]
        found += ["none" if value is None else digest(value) for value in values]
    return found


def get_and_set(precision: str) -> list[Any]:
    """Read by rank 0 alone, read by all, set by all; then train on."""
    model, optimizer = trained(precision)
    found: list[Any] = [values_of_all(model) if rank() == 0 else None]
    if torch.distributed.is_initialized():
        deepspeed.comm.barrier()
    model(rows().to(next(model.parameters()).dtype)).float().square().mean().backward()
    found.append(values_of_all(model))
    for number, param in enumerate(model.parameters()):
        values = torch.linspace(-1.0, 1.0, param.numel()).view(param.shape) * (number + 1)
        utils.safe_set_full_fp32_param(param, values)
        utils.safe_set_full_optimizer_state(param, values.abs(), "exp_avg_sq")
        utils.safe_set_full_grad(param, values / 3)
    found.append(values_of_all(model))
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer)
    found.append(values_of_all(model))
    engine_of(model).close()
    return found


def local_parts(precision: str) -> list[Any]:
    """Each rank reads its part, and sets it to other values; all see what all have set."""
    model, optimizer = trained(precision)
    model(rows().to(next(model.parameters()).dtype)).float().square().mean().backward()
    parts = []
    for param in model.parameters():
        mine: list[Tensor | None] = [
            utils.safe_get_local_fp32_param(param),
            utils.safe_get_local_grad(param),
            utils.safe_get_local_optimizer_state(param, "exp_avg"),
        ]
        values = [value for value in mine if value is not None]
        assert torch.equal(param.ds_tensor, values[0].to(param.dtype)), "the same part"
        parts.append([value.numpy() for value in values])
        utils.safe_set_local_fp32_param(param, values[0] + 1.0)
        utils.safe_set_local_grad(param, values[1] * 2.0)
        utils.safe_set_local_optimizer_state(param, values[2] * 3.0, "exp_avg")
    full = []
    for param in model.parameters():
        seen = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_grad(param)]
        seen.append(utils.safe_get_full_optimizer_state(param, "exp_avg"))
        full.append([value.numpy().ravel() for value in seen if value is not None])
    optimizer.step()
    engine_of(model).close()
    return [parts, full]
