"""A GPT that drops layers as models for DeepSpeed do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.models import TinyGPT


class DroppingGPT(TinyGPT):
    """Layer ``i`` of ``n`` runs with probability ``1 - i / n * (1 - pld_theta)``.

    Attributes:
        left_out: how many layers were, in all.
        lengths: of the sequences that it was given.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"depth": 8, "dropout": 0.0, **settings})
        self.left_out = 0
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        self.lengths.append(tokens.shape[1])
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for number, block in enumerate(self.blocks, start=1):
            keep = 1.0 - number / len(self.blocks) * (1.0 - pld_theta)
            if progressive_layer_drop and float(torch.rand(())) >= keep:
                self.left_out += 1
            elif self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.head(self.norm(x))
