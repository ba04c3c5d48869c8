"""The optimizers under test, each with the one of torch (or the definition) that it follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import deepoffload


class ReferenceLion(torch.optim.Optimizer):
    """Lion as its paper defines it, in torch's operations."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, maximize: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                beta1, beta2 = group["betas"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(torch.sign(momentum.lerp(grad, 1 - beta1)), alpha=group["lr"])
                momentum.lerp_(grad, 1 - beta2)


@dataclass(frozen=True)
class Kind:
    """One of our optimizers with settings, and its reference with the same ones.

    Attributes:
        arrays: keys of its state that are arrays.
    """

    name: str
    make: Callable[..., Any]
    reference: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    reference_only: dict[str, Any] = field(default_factory=dict)

    def ours(self, params: Any, **changes: Any) -> Any:
        return self.make(params, **(self.settings | changes))

    def theirs(self, params: Any, **changes: Any) -> Any:
        return self.reference(params, **(self.settings | self.reference_only | changes))

    def __str__(self) -> str:
        return self.name


_ADAM = ("exp_avg", "exp_avg_sq")
_LION = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1, "maximize": False}
_SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
_FUSED = {"fused": True}
KINDS = (
    Kind("adamw", deepoffload.CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, _ADAM, _FUSED),
    Kind("lion", deepoffload.CPULion, ReferenceLion, _LION, ("exp_avg",)),
    Kind(
        "adagrad",
        deepoffload.CPUAdagrad,
        torch.optim.Adagrad,
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01},
        ("sum",),
    ),
    Kind("sgd", deepoffload.CPUSGD, torch.optim.SGD, _SGD, ("momentum_buffer",)),
)
STORED = (
    Kind("adamw_8bit", deepoffload.CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "state_dtype": "8bit"}, _ADAM),
    Kind("adamw_bf16", deepoffload.CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "state_dtype": "bf16"}, _ADAM),
    Kind("lion_bf16", deepoffload.CPULion, ReferenceLion, _LION | {"state_dtype": "bf16"}, ("exp_avg",)),
)
"""Those whose states are stored in fewer bits than they are computed in: not within ulps of their references."""

VARIANTS = (
    *KINDS,
    Kind(
        "amsgrad",
        deepoffload.CPUAdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "amsgrad": True},
        (*_ADAM, "max_exp_avg_sq"),
        _FUSED,
    ),
    Kind("adamw_maximize", deepoffload.CPUAdamW, torch.optim.AdamW, {"lr": 1e-2, "maximize": True}, _ADAM, _FUSED),
    Kind("lion_maximize", deepoffload.CPULion, ReferenceLion, _LION | {"maximize": True}, ("exp_avg",)),
    Kind(
        "adagrad_start",
        deepoffload.CPUAdagrad,
        torch.optim.Adagrad,
        {"lr": 0.05, "initial_accumulator_value": 0.5, "maximize": True},
        ("sum",),
    ),
    Kind("sgd_nesterov", deepoffload.CPUSGD, torch.optim.SGD, _SGD | {"nesterov": True}, ("momentum_buffer",)),
    Kind(
        "sgd_dampening",
        deepoffload.CPUSGD,
        torch.optim.SGD,
        _SGD | {"dampening": 0.5, "maximize": True},
        ("momentum_buffer",),
    ),
    Kind("sgd_plain", deepoffload.CPUSGD, torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.01}),
)


def ulp(values: Tensor) -> Tensor:
    """The unit in the last place of fp32 numbers of this size."""
    return torch.exp2(torch.floor(torch.log2(values.double().abs().clamp_min(2.0**-126))) - 23)


def gradient(param: Tensor, seed: int) -> Tensor:
    """A random gradient, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(param.shape, generator=generator).to(param.dtype)
