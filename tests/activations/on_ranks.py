"""Ranks that train one model, with activations that leave and with ones that stay."""

from __future__ import annotations

import os
from typing import Any

import torch

import deepoffload
from deepoffload import offload_context
from tests.support.loops import assert_same_bits, train, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss


def trained(folder: str, config: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    rank = int(os.environ["RANK"])
    context = offload_context(host_budget="16MiB", nvme_path=folder, debug={"poison": True}, **config)
    with context:
        torch.manual_seed(0)
        model = TinyGPT(checkpointing=False)

    def loss_of(net: Any, tokens: torch.Tensor) -> torch.Tensor:
        return next_token_loss(net, batch(int(tokens[0, 0]) + 50 * rank))  # each rank has other tokens

    run = train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2), steps=3, loss_of=loss_of)
    found, weights = deepoffload.stats(model), weights_of(model)
    context.engine.close()
    return [run.losses, weights], found


def both_ways(folder: str) -> dict[str, float]:
    """Wants the same bits with activations that stay and that leave. Returns the numbers of the latter."""
    leaving = {"offload_activations": "nvme", "activation_budget": 2 * (16 << 10)}
    usual, _ = trained(folder, {})
    found, stats = trained(folder, leaving)
    assert_same_bits(usual, found)
    return stats
