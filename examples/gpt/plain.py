"""The same training in plain PyTorch: what the offloaded run is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gpt.training import BETAS


class PlainAdamW(torch.optim.AdamW):
    """torch's fused AdamW with global-norm clipping; for bf16 weights on fp32 master weights.

    Args:
        params: the model's parameters, float32; with ``bf16`` they become bfloat16 here, and their values the masters.
        max_grad_norm: clip to this L2 norm (summed in float64), or None.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, bf16: bool, max_grad_norm: float | None) -> None:
        self.weights = list(params)
        self.bf16 = bf16
        self.max_grad_norm = max_grad_norm
        masters: list[Tensor] = list(self.weights)
        if bf16:
            masters = [weight.data for weight in self.weights]
            for weight in self.weights:
                weight.data = weight.data.to(torch.bfloat16)
        super().__init__(masters, lr=lr, betas=BETAS, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        grads = [weight.grad for weight in self.weights]
        factor = 1.0
        if self.max_grad_norm is not None:
            norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads if grad is not None))
            factor = min(1.0, self.max_grad_norm / (norm + 1e-6))
        masters = [master for group in self.param_groups for master in group["params"]]
        for master, grad in zip(masters, grads, strict=True):
            if grad is not None:
                master.grad = grad.float() * factor
        loss = super().step(closure)
        if self.bf16:
            for master, weight in zip(masters, self.weights, strict=True):
                weight.copy_(master)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None
