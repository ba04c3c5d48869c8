"""Losses per token of a linear head, for some tokens at a time: logits of all tokens never exist.

The forward keeps hidden states, the head's weight and the targets. The backward makes the logits of each tile of tokens
again. The weight is one saved tensor, which both passes hold from their first tile to their last: a paged one is read
once in each.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic


class Factors(NamedTuple):
    """The gradient of a token's logits: ``softmax`` times their softmax, plus ``target`` at the target, plus ``all``.
    Each ``[tokens]``; None for none."""

    softmax: Tensor
    target: Tensor
    all: Tensor | None = None


class Losses(abc.ABC):
    """What is computed of each token's logits.

    Attributes:
        count: how many values.
    """

    count = 1

    @abc.abstractmethod
    def values(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """From fp32 logits ``[tokens, classes]``, which nobody else needs, and targets ``[tokens]``: values
        ``[tokens]`` in fp32."""

    @abc.abstractmethod
    def factors(self, targets: Tensor, gradients: tuple[Tensor, ...], num_classes: int) -> Factors:
        """From gradients of the values."""

    @abc.abstractmethod
    def places(self, targets: Tensor, num_classes: int) -> Tensor:
        """Which logit is the target's, ``[tokens]``; any where it is none."""


PRODUCT_BYTES = 32 << 20
"""Of a 16-bit weight's gradient that are computed at a time, before they are added up in fp32."""


class Tiles(NamedTuple):
    """How many tokens are computed at a time, and what of their logits."""

    tokens: int
    losses: Losses

    def ranges(self, num_tokens: int) -> Iterator[slice]:
        """Of tokens; the last may be shorter."""
        return (slice(start, min(start + self.tokens, num_tokens)) for start in range(0, num_tokens, self.tokens))


def losses_per_token(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, tiles: Tiles
) -> tuple[Tensor, ...]:
    """What ``tiles.losses`` gives for ``F.linear(hidden, weight, bias).float()``, with gradients.

    Args:
        hidden: ``[tokens, features]``. weight: ``[classes, features]``. targets: ``[tokens]``.
    """
    if has_torch_function_variadic(hidden, weight, bias):  # a paged head stays in memory for all of it
        relevant = (hidden, weight) if bias is None else (hidden, weight, bias)
        return handle_torch_function(losses_per_token, relevant, hidden, weight, bias, targets, tiles)
    return _PerToken.apply(tiles, hidden, weight, bias, targets)


class _PerToken(torch.autograd.Function):
    """See :func:`losses_per_token`."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.tiles = tiles
        ctx.cast = _casting(hidden.device.type)
        # Made before the logits of the first tile: what lives on behind these would keep their memory from being used
        # again, tile by tile, until all logits had had separate memory.
        every = tuple(hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(tiles.losses.count))
        for tile in tiles.ranges(len(targets)):
            found = tiles.losses.values(F.linear(hidden[tile], weight, bias).float(), targets[tile])
            for whole, part in zip(every, found, strict=True):
                whole[tile] = part
            del found, part
        return every

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        _, of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        found_hidden = torch.empty_like(hidden) if of_hidden else None
        sums = _Sums(weight) if of_weight else None
        bias_sum = weight.new_zeros(len(weight), dtype=_wide(weight.dtype)) if of_bias else None
        for tile in ctx.tiles.ranges(len(targets)):
            with ctx.cast():
                logits = F.linear(hidden[tile], weight, bias)
            grad = _of_logits(ctx.tiles.losses, logits, targets[tile], tuple(each[tile] for each in gradients))
            del logits
            if found_hidden is not None:
                found_hidden[tile] = grad @ weight.to(grad.dtype)
            if sums is not None:
                sums.add(grad, hidden[tile].to(grad.dtype))
            if bias_sum is not None:
                bias_sum += grad.sum(0, dtype=bias_sum.dtype)
            del grad
        found_bias = None if bias_sum is None or bias is None else bias_sum.to(bias.dtype)
        return None, found_hidden, None if sums is None else sums.total(), found_bias, None


def _of_logits(losses: Losses, logits: Tensor, targets: Tensor, gradients: tuple[Tensor, ...]) -> Tensor:
    """The gradient of a tile's logits, in their memory."""
    num_classes, dtype = logits.shape[1], logits.dtype
    factors = losses.factors(targets, gradients, num_classes)
    grad = logits.float()
    torch.softmax(grad, 1, out=grad)
    grad *= factors.softmax.unsqueeze(1)
    if factors.all is not None:
        grad += factors.all.unsqueeze(1)
    places = losses.places(targets, num_classes).unsqueeze(1)
    return grad.scatter_add_(1, places, factors.target.unsqueeze(1)).to(dtype)


class _Sums:
    """The gradient of a weight, added up over tiles: in fp32, also where the weight has 16 bits."""

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        self._sum = torch.zeros(weight.shape, dtype=_wide(weight.dtype), device=weight.device)

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add what the tokens of one tile give."""
        if self._sum.dtype is grad.dtype:
            self._sum.addmm_(grad.t(), hidden)
            return
        rows = max(1, PRODUCT_BYTES // (hidden.shape[1] * hidden.element_size()))
        for start in range(0, len(self._sum), rows):
            self._sum[start : start + rows] += grad[:, start : start + rows].t() @ hidden

    def total(self) -> Tensor:
        """In the weight's type."""
        return self._sum.to(self._dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over tiles are made in."""
    return torch.promote_types(dtype, torch.float32)


def _casting(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What of autocast is on now, to be on again in backward."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, cache_enabled=False)
