"""What a process takes at most while it builds, loads, trains and saves a model of 69 M parameters.

``SWAP_DIRECTORY plain|paged KEYWORD=VALUE ... [then plain|paged KEYWORD=VALUE ...]``. Each of these has a separate
process, forked when all is imported and before torch has started a thread; it prints a line of JSON, in MiB.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepoffload
from deepoffload import offload_context
from tests.support.memory_watch import MemoryWatch, give_back

SWAP = sys.argv[1]
SIZES = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
CONFIG = LlamaConfig(
    **SIZES, num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=256, pad_token_id=0
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STATE_BYTES = {"bf16": 14, "fp32": 16}
"""Weights, gradients and optimizer state per parameter, as they are stored."""


class Phases:
    """Notes the peak of each phase, in MiB."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._watch = MemoryWatch()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        give_back()
        self._watch.take_peak()
        yield
        self.peaks[name] = self._watch.take_peak() / 2**20


def count() -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in LlamaForCausalLM(CONFIG).parameters())


def forward_and_backward(model: Any, seed: int) -> float:
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 128), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


def plain(watch: Phases, precision: str, checkpoint: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    if checkpoint:
        model.save_pretrained(checkpoint)
    model = model.to(DTYPES[precision])
    losses = []
    with watch.phase("step"):
        losses.append(forward_and_backward(model, 0))
    weights = sum(param.nbytes for param in model.parameters()) / 2**20
    return {"losses": losses, "weights": weights, "parameters": count()}


def paged(watch: Phases, precision: str, share: str, checkpoint: str, steps: str = "2") -> dict[str, Any]:
    """The whole life: build (or load, where there is a checkpoint), train, save."""
    parameters = count()
    budget = int(parameters * STATE_BYTES[precision] / float(share))
    context = offload_context(host_budget=budget, nvme_path=SWAP, precision=precision)
    torch.manual_seed(0)
    if os.path.isdir(checkpoint):
        with watch.phase("load"), context:
            model = LlamaForCausalLM.from_pretrained(checkpoint)
    else:
        with watch.phase("build"), context:
            model = LlamaForCausalLM(CONFIG)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    losses = []
    with watch.phase("train"):
        for step in range(int(steps)):
            losses.append(forward_and_backward(model, step))
            optimizer.step()
            optimizer.zero_grad()
    if not os.path.isdir(checkpoint):
        with watch.phase("save"):
            deepoffload.save_pretrained(model, checkpoint)
    stats = deepoffload.stats(model)
    return {"losses": losses, "budget": budget / 2**20, "parameters": parameters, "stats": stats}


def main(name: str, *words: str) -> None:
    watching = Phases()
    with watching.phase("imports"):
        pass
    facts = globals()[name](watching, **dict(word.split("=", 1) for word in words))
    print(json.dumps({"peaks": watching.peaks} | facts), flush=True)


if __name__ == "__main__":
    for said in " ".join(sys.argv[2:]).split(" then "):
        child = os.fork()
        if not child:
            main(*said.split())
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{said} has failed")
