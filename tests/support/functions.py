"""Custom autograd functions as people write them: what they keep of a weight, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SavesWeight(torch.autograd.Function):
    """By the book: ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class KeepsWeight(torch.autograd.Function):
    """Keeps its weight as an attribute, a view of it as another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight.t(), ctx.x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Recomputes(torch.autograd.Function):
    """Runs its forward again inside backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            weight = ctx.weight.detach().requires_grad_()
            output = torch.tanh(x @ weight)
        return torch.autograd.grad(output, [x, weight], gradient)
