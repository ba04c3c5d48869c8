"""Models that drop layers as those for DeepSpeed do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepoffload
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
        return self.head(self.hidden(tokens, progressive_layer_drop, pld_theta))

    def hidden(self, tokens: Tensor, progressive_layer_drop: bool, pld_theta: float) -> Tensor:
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
        return self.norm(x)


class TiledDroppingGPT(DroppingGPT):
    """The same with its layers, MLPs and loss in tiles. Gives the loss."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        assert deepoffload.tile_linear(self, 12288) and deepoffload.tile_mlp(self, 2, ["mlp"])

    def forward(self, tokens: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        hidden = self.hidden(tokens, progressive_layer_drop, pld_theta)
        return deepoffload.tiled_loss(hidden[:, :-1], self.head, tokens[:, 1:], max_bytes=4096)


class _Droppable(nn.Module):
    """A layer of transformers that its model may leave out."""

    def __init__(self, layer: nn.Module, share: float, model: DroppingLayers) -> None:
        super().__init__()
        self.layer, self.share = layer, share
        self.model = [model]  # in a list: it is no child

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        model = self.model[0]
        if model.theta < 1.0 and float(torch.rand(())) >= 1.0 - self.share * (1.0 - model.theta):
            model.left_out += 1
            return x
        found: Tensor = self.layer(x, *args, **kwargs)
        return found


class DroppingLayers(nn.Module):
    """A causal language model of transformers whose decoder layers are dropped.

    Attributes:
        left_out: how many layers were, in all.
    """

    def __init__(self, build: Callable[..., Any], checkpointing: bool) -> None:
        super().__init__()
        self.model = build(num_hidden_layers=4)
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        layers = self.model.model.layers
        for number, layer in enumerate(layers, start=1):
            layers[number - 1] = _Droppable(layer, number / len(layers), self)
        self.left_out, self.theta = 0, 1.0

    def forward(self, tokens: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        self.theta = pld_theta if progressive_layer_drop else 1.0
        found: Tensor = self.model(tokens).logits
        return found
