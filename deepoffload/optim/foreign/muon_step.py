"""Muon for matrices and AdamW for the rest, as one of torch's optimizers: its two classes, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UsageError

MUON_DEFAULTS = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.0, "ns_method": "standard"}
ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
"""DeepSpeed's defaults. It begins with ``ns_method="gram"``."""

NS_METHODS = ("standard", "gram")

_RESTART = 2
"""After so many iterations on the Gram matrix its product is applied: half precision loses too much beyond."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups with ``use_muon=True`` are stepped by ``torch.optim.Muon``, the others by ``torch.optim.AdamW``.

    Stacked experts of three dimensions count as so many matrices. ``ns_method="gram"`` replaces Muon's iteration.

    Args:
        params: groups, each with ``use_muon`` and settings of its class.

    Raises:
        UsageError: a group does not say ``use_muon``. ValueError: a parameter is no matrix, or a setting is out of
        range.
    """

    def __init__(self, params: Any) -> None:
        self._muon, self._adamw = torch.optim.Muon(_nothing()), torch.optim.AdamW(_nothing())
        super().__init__([self._filled(group) for group in params], {})

    def _filled(self, group: Any) -> dict[str, Any]:
        if not isinstance(group, dict) or "use_muon" not in group:
            raise UsageError("Muon needs groups that say use_muon=True or False; deepoffload.Muon(model) makes them")
        if not group["use_muon"]:
            filled = {**self._adamw.defaults, **ADAM_DEFAULTS, **group}
            torch.optim.AdamW(_nothing(), **{key: filled[key] for key in ("lr", "betas", "eps", "weight_decay")})
            return filled
        filled = {**self._muon.defaults, **MUON_DEFAULTS, **group}
        torch.optim.Muon(_nothing(), **{key: filled[key] for key in ("lr", "weight_decay", "momentum", "adjust_lr_fn")})
        if filled["ns_method"] not in NS_METHODS:
            raise ValueError(f"ns_method must be one of {', '.join(NS_METHODS)}, got {filled['ns_method']!r}")
        for each in group["params"]:
            param = each[1] if isinstance(each, tuple) else each
            if param.dim() not in (2, 3):
                raise ValueError(
                    f"Muon only supports 2D parameters and stacks of them, and one has the shape {tuple(param.shape)}: "
                    "give it to a group with use_muon=False"
                )
        return filled

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step(self._adamw, group, group["params"], self.state)
                continue
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
            matrices, state = _matrices(params, self.state)
            if group["ns_method"] == "gram":
                for matrix in matrices:
                    _gram_step(matrix, state[matrix]["momentum_buffer"], group)
            else:
                self._step(self._muon, group, matrices, state)
        return loss

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: Sequence[Tensor], state: Any) -> None:
        optimizer.param_groups = [{**group, "params": list(params)}]
        optimizer.state = state
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, optimizer.state = [], defaultdict(dict)


def _nothing() -> list[nn.Parameter]:
    """For objects of torch's classes that know and check settings."""
    return [nn.Parameter(torch.empty(1, 1, dtype=torch.float32, device="meta"))]


def _matrices(params: Sequence[Tensor], state: Any) -> tuple[list[Tensor], dict[Tensor, dict[str, Tensor]]]:
    """Every matrix, those in stacks one by one, with its momentum: views."""
    matrices: dict[Tensor, dict[str, Tensor]] = {}
    for param in params:
        momentum, grad = state[param]["momentum_buffer"], param.grad
        if param.dim() == 2:
            matrices[param] = {"momentum_buffer": momentum}
            continue
        for index in range(param.shape[0]):
            matrix = param.detach()[index]
            matrix.grad = None if grad is None else grad[index]
            matrices[matrix] = {"momentum_buffer": momentum[index]}
    return list(matrices), matrices


def _gram_step(param: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """``torch.optim.Muon``'s step, with another way to the same polynomial."""
    grad = param.grad
    assert grad is not None
    momentum.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    update = gram_newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rows, columns = param.shape
    ratio = max(1.0, rows / columns) ** 0.5
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * max(rows, columns) ** 0.5
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(update, alpha=-lr * ratio)


def gram_newton_schulz(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """An almost orthogonal matrix near ``update``, by Newton-Schulz iterations on its Gram matrix.

    With ``R = X X^T`` of the smaller side, ``X <- (a + b R + c R^2) X`` changes ``R`` to ``P R P`` with the symmetric
    ``P = a + b R + c R^2``: so the iteration needs only small matrices, and ``X`` is multiplied at the end and once
    in between (Dao et al. 2026, *Gram Newton-Schulz*). In fp16 on an accelerator, in fp32 on the CPU.
    """
    a, b, c = coefficients
    wide = update.to(torch.float32 if update.device.type == "cpu" else torch.float16)
    is_tall = update.shape[0] > update.shape[1]
    wide = wide.T if is_tall else wide
    wide = wide / wide.norm().clamp(min=eps)
    gram, product = wide @ wide.T, None
    for number in range(steps):
        if number == _RESTART and product is not None:
            wide = product @ wide
            gram, product = wide @ wide.T, None
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        gram = factor @ gram @ factor
    if product is not None:
        wide = product @ wide
    return (wide.T if is_tall else wide).to(update.dtype)
