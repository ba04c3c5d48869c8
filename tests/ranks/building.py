"""What the ranks of the tests of construction do."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import DeepOffloadError
from deepoffload.runtime.building import kept_bytes
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import digests, rank, train
from tests.support.models import TinyGPT


def large() -> nn.Module:
    return TinyGPT(width=64, depth=24, dropout=0.0)


def registered_bytes() -> int:
    with torch.device("meta"):
        return sum(param.nbytes for param in large().parameters())


def share_bytes(ranks: int) -> int:
    """What each rank keeps of its parameters, in whole pages."""
    with torch.device("meta"):
        return sum(kept_bytes(param.nbytes, ranks) for param in large().parameters())


def build_load_train_save(config: dict[str, Any], source: str, target: str) -> tuple[dict[str, float], Any]:
    """Returns what the set-up took, and the norm of the gradient. The weights are in ``target``."""
    torch.manual_seed(5)
    with offload_context({"gradient_dtype": "fp32", "precision": "bf16", **config}) as context:
        model = large()
        assert context.engine is not None
        built = dict(context.engine.stats())
        deepoffload.load_pretrained(model, source)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    norms = train(model.train(), optimizer, range(1))
    deepoffload.save_pretrained(model, target, max_shard_size="1MB")
    engine_of(model).close()
    return built, norms


def moved_and_said(config: dict[str, Any]) -> tuple[str, list[float]]:
    """The last line of the table, and the bytes that one step has got from the other rank: weights and gradients."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepoffload").addHandler(handler)
    logging.getLogger("deepoffload").setLevel(logging.INFO)
    torch.manual_seed(6)
    with offload_context({"precision": "bf16", **config}):
        model = TinyGPT(width=128, depth=3, dropout=0.0).train()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    before = deepoffload.stats(model)
    train(model, optimizer, range(2, 3))
    after = deepoffload.stats(model)
    engine_of(model).close()
    table = next(line for line in lines if line.startswith("placement"))
    return table.splitlines()[-1], [after[name] - before[name] for name in ("gather_bytes", "reduce_bytes")]


class Looked(nn.Module):
    """A model whose later parts look at earlier ones, and write to them, while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(24))
        for number, layer in enumerate(self.layers):
            if number % 5 == 0:
                with torch.no_grad():
                    layer.weight.div_(layer.weight.norm())  # what it reads is of all ranks
        self.layers[3].weight.data.add_(1.0)
        self.scale = nn.Parameter(self.layers[0].weight.detach().abs().mean(0))
        self.layers[7] = nn.Linear(64, 64)  # the one before dies
        nn.init.normal_(self.layers[9].weight)
        self.held = self.layers[11].weight.data[0]
        self.layers[12:].to(torch.bfloat16)  # those that were put away, and those that are whole


def look_back(config: dict[str, Any]) -> dict[str, str]:
    torch.manual_seed(6)
    with offload_context(**config):
        model = Looked()
    found = digests(model.state_dict())
    engine_of(model).close()
    return found


def build_otherwise(config: dict[str, Any], how: str) -> str:
    """Models whose values, or looks, differ between ranks."""
    torch.manual_seed(6 + (rank() if how == "values" else 0))
    try:
        with offload_context(config):
            model = Looked()
            if rank() == 1 and how == "looks":
                float(model.layers[2].weight.sum())
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
