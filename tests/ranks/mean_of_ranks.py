"""The mean over ranks of their gradients, made by one process that has all of their micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scale_gradients(model: nn.Module, factor: float) -> None:
    """One process makes the mean of what the ranks would have. Not by its losses: small fp16 gradients would differ."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


class MeanOfRanks:
    """To be told of each backward, in the order (micro-batch, rank).

    With a power of two of ranks the gradients add up as they do by themselves, and the sum is multiplied by 1/N. Other
    1/N are no fp32 numbers. There each gradient is multiplied and added in one rounding, as ranks do where it lands.

    Args:
        ranks: how many there would be.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._model = model
        self._share = torch.tensor(1.0 / ranks, dtype=torch.float32)
        self._one_by_one = ranks & (ranks - 1) != 0
        self._sums: dict[str, Tensor] = {}

    def backward_is_over(self) -> None:
        """One rank's gradients of one micro-batch have come."""
        for name, grad in self._gradients() if self._one_by_one else ():
            added = self._sums.get(name)
            if added is None:
                self._sums[name] = grad * self._share
            else:
                self._sums[name] = multiply_add(grad, self._share, added)
            grad.fill_(-0.0)  # what is added to it keeps its sign, also zeros

    def make(self) -> None:
        """``.grad`` is the mean now; the next step begins."""
        if not self._one_by_one:
            scale_gradients(self._model, float(self._share))
        for name, grad in self._gradients() if self._one_by_one else ():
            grad.copy_(self._sums[name])
        self._sums.clear()

    def _gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, param.grad) for name, param in self._model.named_parameters() if param.grad is not None]


def multiply_add(factor: Tensor, other: Tensor, added: Tensor) -> Tensor:
    """``factor * other + added`` of fp32 tensors, rounded once.

    The product is exact in double. What the sum loses there makes its last bit odd, so that it rounds on to fp32 as the
    exact value does.
    """
    product, added = factor.double() * other.double(), added.double()
    total = product + added
    part = total - product
    lost = (product - (total - part)) + (added - part)
    is_even = total.view(torch.int64) & 1 == 0
    towards = torch.where(lost > 0, torch.inf, -torch.inf).double()
    odd = torch.nextafter(total, towards)
    return torch.where((lost != 0) & torch.isfinite(lost) & is_even, odd, total).float()
