"""The model that a random program is about, and what the program holds on to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepoffload
from tests.fuzz.blocks import BLOCKS, WIDTH

ROWS = 11
"""Size of the vocabulary."""

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "CPUAdamW": lambda params: deepoffload.CPUAdamW(params, lr=1e-2, weight_decay=0.1),
    "CPUAdam clipped": lambda params: deepoffload.CPUAdamW(params, lr=1e-2, max_grad_norm=0.1),
    "CPULion": lambda params: deepoffload.CPULion(params, lr=1e-3),
    "CPUSGD": lambda params: deepoffload.CPUSGD(params, lr=1e-2, momentum=0.9),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
}
"""Those of ours take ordinary parameters with the same bits, so that all of training is compared."""


class Net(nn.Module):
    """An embedding, random blocks and a head; some blocks stand twice, some behind an activation checkpoint.

    Args:
        kinds: the blocks' kinds; the same number of ``checkpoints`` says how each is called.
        order: which blocks a forward calls, one after the other.
        tied: whether the head uses the embedding's weight.
    """

    def __init__(
        self, kinds: tuple[str, ...], checkpoints: tuple[bool | None, ...], order: tuple[int, ...], tied: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(BLOCKS[kind]() for kind in kinds)
        self.head = nn.Linear(WIDTH, ROWS)
        self.checkpoints = checkpoints
        self.order = order
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            layer, how = self.layers[index], self.checkpoints[index]
            x = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
        return self.head(x)


class Subject:
    """A model under test, its optimizer, and what the program keeps of both.

    Attributes:
        draw: the program's dice, the same for a plain and for a paged model.
        kept: tensors that the program holds over several operations.
        open: a loss whose backward is still to come.
    """

    def __init__(self, model: Any, optimizer: str, seed: int) -> None:
        self.model = model
        self.draw = random.Random(seed)
        self.kept: list[Tensor] = []
        self.open: Tensor | None = None
        self._make = OPTIMIZERS[optimizer]
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> Any:
        return self._make([param for param in self.model.parameters() if param.requires_grad])

    def tokens(self, number: int) -> Tensor:
        return (torch.arange(10).view(2, 5) * (number + 1) + number) % ROWS

    def loss(self, number: int = 0) -> Tensor:
        tokens = self.tokens(number)
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), (tokens.flatten() + 1) % ROWS)

    def layer(self) -> Any:
        """One of the model's blocks."""
        return self.model.layers[self.draw.randrange(len(self.model.layers))]
