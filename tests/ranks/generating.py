"""Ranks that generate with one model, each other prompts and as many tokens as it likes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import UsageError
from tests.support.inspect import units_of
from tests.support.models import llama, mixtral

MODELS = {
    "llama": lambda: llama(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4),
    "mixtral": mixtral,
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def _generated(model: Any, tokens: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    found = {}
    for number, (how, settings) in enumerate(HOW.items()):
        torch.manual_seed(10 * rank + number)
        length = 2 + 3 * ((rank + number) % 2)
        more = {"min_new_tokens": length, "max_new_tokens": length, "pad_token_id": 0}
        found[how] = model.generate(tokens, **settings, **more)
    return found


def generate(name: str, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Which of its ways give other tokens than the model in memory, and what the model takes."""
    rank = int(os.environ["RANK"])
    kind, checkpoint = type(MODELS[name]()), Path(folder) / "checkpoint"
    plain = kind.from_pretrained(checkpoint, dtype="auto").eval()
    context = offload_context({"inference": True, "nvme_path": folder, "debug": {"poison": True}, **config})
    with context:
        paged = kind.from_pretrained(checkpoint, dtype="auto").eval()
    tokens = torch.arange(3 + rank, 15 + rank).view(2, 6)
    expected, found = (_generated(model, tokens, rank) for model in (plain, paged))
    differ = [how for how in HOW if not torch.equal(expected[how], found[how])]
    refused = []
    for train in (lambda: CPUAdamW(paged.parameters()), lambda: paged.requires_grad_(True)):
        try:
            train()
        except UsageError as error:
            refused.append(f"{error}")
    stats, engine = deepoffload.stats(paged), context.engine
    weights = sum(param.numel() * param.element_size() for param in plain.parameters())
    units = units_of(paged)
    engine.close()
    return {
        "differ": differ,
        "refused": refused,
        "stats": stats,
        "stored": sum(unit.weights.nbytes for unit in units) / weights,
        "state": [unit.gradients is not None or bool(unit.pieces) for unit in units],
    }
