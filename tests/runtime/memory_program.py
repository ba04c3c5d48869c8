"""What a process takes at most while it builds, loads, trains and saves a model of 126 M parameters.

``SWAP_DIRECTORY plain|paged|loaded KEYWORD=VALUE ...``; prints JSON in MiB, last. What counts is RssAnon + RssShmem of
``/proc/self/status``, looked at every two milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepoffload
from deepoffload import offload_context

SWAP = sys.argv[1]
SIZES = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16}
CONFIG = LlamaConfig(
    **SIZES, num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=256, pad_token_id=0
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STATE_BYTES = {"bf16": 14, "fp32": 16}
"""Weights, gradients and optimizer state per parameter, as they are stored."""


def resident_mib() -> float:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) / 1024


class Watch:
    """Notes the peak of each phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._phase = "start"
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.look()
            time.sleep(0.002)

    def look(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0.0), resident_mib())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        settle()
        self._phase = name
        self.look()
        yield
        self.look()
        self._phase = "between"


def settle() -> None:
    """Give back what earlier phases have freed, so that it is not counted against this one."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def count() -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in LlamaForCausalLM(CONFIG).parameters())


def forward_and_backward(model: Any, seed: int) -> float:
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 128), generator=torch.Generator().manual_seed(seed))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return float(loss.detach())


def plain(watch: Watch, precision: str, checkpoint: str = "") -> dict[str, Any]:
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


def paged(watch: Watch, precision: str, share: str, checkpoint: str, steps: str = "3") -> dict[str, Any]:
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


if __name__ == "__main__":
    torch.set_num_threads(2)
    watching = Watch()
    with watching.phase("imports"):
        pass
    facts = globals()[sys.argv[2]](watching, **dict(word.split("=", 1) for word in sys.argv[3:]))
    print(json.dumps({"peaks": watching.peaks} | facts), flush=True)
