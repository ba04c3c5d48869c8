"""The transformer that the benchmarks train: the examples' layers, a vocabulary of 8192 and a head of its own.

Imports torch and the examples only, so that peers can run it without deepoffload.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.model import Block, Shape

VOCABULARY = 8192

SHAPES = {
    "tiny": Shape(128, 4),
    "125m": Shape(768, 16),
    "319m": Shape(1024, 24),
    "620m": Shape(1536, 21),
    "1.24b": Shape(2048, 24),
}


def num_parameters(shape: Shape, seq: int) -> int:
    """Weights of :class:`GPT`."""
    block = 12 * shape.hidden**2 + 2 * shape.hidden
    return shape.layers * block + (2 * VOCABULARY + seq + 1) * shape.hidden


class GPT(nn.Module):
    """A decoder. :func:`fill` sets its values.

    Args:
        seq: the longest sequence, in tokens.
    """

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.position = nn.Embedding(seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats per token of ``tokens`` and ``targets``, ``(batch, seq)`` int64 each."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def fill(
    model: GPT, *, seed: int = 0, gathered: Callable[[nn.Parameter], AbstractContextManager[object]] = nullcontext
) -> None:
    """GPT-2's initial values, all of which bf16 can hold, so that every contender starts from the same values.

    Args:
        gathered: entered while a parameter is written.
    """
    for index, (name, param) in enumerate(model.named_parameters()):
        with gathered(param):
            if param.dim() < 2:
                param.fill_(1.0)
                continue
            residual = name.endswith((".out.weight", ".down.weight"))
            std = 0.02 / (math.sqrt(2 * len(model.blocks)) if residual else 1.0)
            generator = torch.Generator().manual_seed(1_000_003 * seed + index)
            values = torch.empty(param.shape).normal_(std=std, generator=generator).bfloat16()
            param.copy_(values)


def tokens_of(number: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch, ``(batch, seq)`` int64 each. Four batches take turns, so that there is something
    to learn."""
    generator = torch.Generator().manual_seed(number % 4)
    rows = torch.randint(VOCABULARY, (batch, seq + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
