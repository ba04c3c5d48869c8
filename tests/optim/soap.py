"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321), with the state of its authors' code.

Written from the paper for these tests. For each dimension of a parameter ``state["GG"]`` has the running average of the
gradient's outer product with itself and ``state["Q"]`` its eigenvectors; a dimension above ``max_precond_dim``, and a
vector, have an empty list there. The first step makes only these. Later steps refine the basis by a power iteration
and give one matrix new memory (``set_``), as that code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SOAP(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 2,
        max_precond_dim: int = 10000,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        rest = {"precondition_frequency": precondition_frequency, "max_precond_dim": max_precond_dim}
        super().__init__(params, {**settings, **rest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad.float(), group)

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, beta1, beta2 = self.state[param], *group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            kept = [grad.dim() > 1 and size <= group["max_precond_dim"] for size in grad.shape]
            state["GG"] = [_outer(grad, dim).mul_(1 - beta2) if keep else [] for dim, keep in enumerate(kept)]
            state["Q"] = [torch.linalg.eigh(each)[1].flip(1) if len(each) else [] for each in state["GG"]]
            return
        state["step"] += 1
        turned = _turned(grad, state["Q"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        correction = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        update = _turned(state["exp_avg"], state["Q"]) / (state["exp_avg_sq"].sqrt() + group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(_turned(update, state["Q"], back=True), alpha=-group["lr"] * correction)
        for dim, average in enumerate(state["GG"]):
            if len(average):
                average.lerp_(_outer(grad, dim), 1 - beta2)
        if state["step"] % group["precondition_frequency"] == 0:
            self._refine(state)

    @staticmethod
    def _refine(state: dict[str, Any]) -> None:
        for dim, (average, basis) in enumerate(zip(state["GG"], state["Q"], strict=True)):
            if len(average):
                power = average @ basis
                order = torch.argsort((basis * power).sum(0), descending=True)
                state["exp_avg_sq"].set_(state["exp_avg_sq"].index_select(dim, order))
                state["Q"][dim] = torch.linalg.qr(power[:, order])[0]


def _outer(grad: Tensor, dim: int) -> Tensor:
    rows = grad.movedim(dim, 0).flatten(1)
    return rows @ rows.T


def _turned(values: Tensor, bases: list[Any], *, back: bool = False) -> Tensor:
    """Into the bases, or back: the first dimension goes to the end each time, so that all are where they were."""
    for basis in bases:
        if len(basis):
            values = torch.tensordot(values, basis, dims=([0], [1 if back else 0]))
        else:
            values = values.movedim(0, -1)
    return values
