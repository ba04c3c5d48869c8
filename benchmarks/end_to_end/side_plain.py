"""PyTorch alone: bf16 weights with fp32 masters, its fused AdamW, everything in memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.gpt import GPT, Shape, fill


class Plain:
    """The usual loop: gradients to fp32, norm and clipping there, one fused call, weights rounded back."""

    notes = ""
    together = False

    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any]) -> None:
        torch.set_default_dtype(torch.bfloat16)
        self.model = GPT(shape, work["seq"])
        torch.set_default_dtype(torch.float32)
        fill(self.model)
        self.weights = list(self.model.parameters())
        self.clip = work["clip"]
        self.optimizer: torch.optim.Optimizer | None = None
        if settings.get("update", True):
            self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
            self.optimizer = torch.optim.AdamW(
                self.masters, lr=work["lr"], betas=(0.9, 0.95), weight_decay=0.01, fused=True
            )
        else:
            ctypes.CDLL(None).malloc_trim(0)  # it stands for the least memory: nothing of what building it took

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def backward(self, loss: Tensor, accumulate: int) -> None:
        (loss / accumulate if accumulate > 1 else loss).backward()

    @torch.no_grad()
    def update(self, last: bool) -> None:
        if not last:
            return
        if self.optimizer is not None:
            for master, weight in zip(self.masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.masters, self.clip)
            self.optimizer.step()
            torch._foreach_copy_(self.weights, self.masters)
            self.optimizer.zero_grad()
        for weight in self.weights:
            weight.grad = None

    def finish(self) -> None:
        """Nothing is ever put off."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Memory is all there is."""


def make(shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> Plain:
    return Plain(shape, work, settings)
