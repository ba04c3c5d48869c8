"""Tiles together with activations that leave, accumulation and clipping: the bits of the same tiles in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepoffload
from deepoffload import stats
from tests.support.loops import assert_same_bits, train
from tests.support.models import TinyGPT, llama, mixtral
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain
from tests.tiling.tiled_models import LIMIT_BYTES, SMALLER

BLOCK_INPUTS = {"offload_activations": "nvme", "activation_budget": 16 << 10}
EVERYTHING = {**BLOCK_INPUTS, "offload_activations_above": 1, "activation_budget": 64 << 10}


class TiledGPT(TinyGPT):
    """Gives the loss, whose logits are made in tiles; its layers and MLPs are in tiles, too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**SMALLER["gpt"], **settings)
        deepoffload.tile_linear(self, LIMIT_BYTES["gpt"])
        deepoffload.tile_mlp(self, 3, ["mlp"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return deepoffload.tiled_loss(self.norm(x)[:, :-1], self.head, tokens[:, 1:], max_bytes=4096)


def tiled(build: Callable[..., Any], name: str, *, checkpointed: bool) -> Any:
    model = build(**SMALLER[name])
    if checkpointed:
        model.gradient_checkpointing_enable()
    deepoffload.tile_linear(model, LIMIT_BYTES[name])
    deepoffload.tile_mlp(model, 3, "experts" if name == "mixtral" else None)
    deepoffload.tile_loss(model, 4096)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": TiledGPT,
    "gpt, checkpointed": partial(TiledGPT, checkpointing=False),
    "llama, checkpointed": partial(tiled, llama, "llama", checkpointed=True),
    "mixtral": partial(tiled, mixtral, "mixtral", checkpointed=False),
    "mixtral, checkpointed": partial(tiled, mixtral, "mixtral", checkpointed=True),
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens) if isinstance(model, TiledGPT) else model(input_ids=tokens, labels=tokens).loss
    return found


@pytest.mark.parametrize(
    ("name", "setting", "config"),
    [
        ("gpt", EVICTING, EVERYTHING),
        ("gpt, checkpointed", TIGHT, BLOCK_INPUTS),
        ("llama, checkpointed", RESIDENT, BLOCK_INPUTS),
        ("mixtral", TIGHT, EVERYTHING),
        ("mixtral, checkpointed", TIGHT, BLOCK_INPUTS),
    ],
    ids=str,
)
def test_with_offloaded_activations_accumulation_and_clipping(
    paging: Paging, name: str, setting: Setting, config: dict[str, Any]
) -> None:
    found = []
    for paged in (False, True):
        if paged:
            budget = paging.least_bytes(MODELS[name], setting, key=("together", name)) * (setting.room or 100)
            with paging.context(setting, int(budget) + config["activation_budget"], **config):
                torch.manual_seed(0)
                model = MODELS[name]()
        else:
            model = plain(MODELS[name])
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        found.append(vars(train(model, optimizer, steps=3, accumulate=3, loss_of=loss_of)))
    assert_same_bits(*found)
    shown = stats(model)
    assert shown["activations_taken"] > 0
    assert setting is RESIDENT or shown["evictions"] > 0


def test_lora_on_layers_in_tiles_is_refused_by_peft() -> None:
    """Whose error says what it adapts. LoRA first, then tiles, works (``tests.models.matrix``)."""
    import peft

    model = llama(**SMALLER["llama"])
    deepoffload.tile_linear(model, 8192)
    with pytest.raises(ValueError, match=r"(?s)LinearInTiles.* is not supported"):
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
