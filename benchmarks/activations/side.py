"""One way in a process of its own: a few steps, their time, and the most memory that the process has had."""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepoffload
from benchmarks.common.gpt import GPT, SHAPES, fill, tokens_of
from benchmarks.end_to_end.meter import SAMPLE_INTERVAL_S, memory_bytes

WAYS = {
    "checkpointing": (),
    "logits": ("logits",),
    "activations": ("activations",),
    "both": ("logits", "activations"),
    "all": ("logits", "activations", "perceptron"),
}
"""What is done in addition to activation checkpoints of the layers."""

SAME = {"activations": "checkpointing", "both": "logits"}
"""Ways whose bits are equal: tiles add up in another order, activations that leave change nothing."""

WARM_UP = 32
"""Part of the tokens of a step with which the engine learns the order of uses."""

TILES = 8
"""Of the perceptron, along the sequence."""


class Windowed(nn.Module):
    """A layer's attention in which tokens see those of their window alone."""

    def __init__(self, attention: nn.Module, window: int) -> None:
        super().__init__()
        self.attention, self.window = attention, window

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.window, x.shape[-1])
        mixed: Tensor = self.attention(rows)
        return mixed.view_as(x)


class Long(GPT):
    """The model for one long sequence: every layer behind a checkpoint. Where the perceptron goes in tiles, each tile
    and the attention have one of their own: a tile inside of the layer's checkpoint would be computed a third time."""

    tiles_logits = False
    tiles_perceptron = False

    def layer(self, block: Any, x: Tensor) -> Tensor:
        if not self.tiles_perceptron:
            return self.checkpointed(lambda block, x: self.perceptron(block, self.attend(block, x)), block, x)
        x = self.checkpointed(self.attend, block, x)
        parts = x.chunk(TILES, dim=1)
        return torch.cat([self.checkpointed(self.perceptron, block, part) for part in parts], dim=1)

    @staticmethod
    def checkpointed(part: Callable[[Any, Tensor], Tensor], block: Any, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(part, block, x, use_reentrant=False)
        return found

    @staticmethod
    def attend(block: Any, x: Tensor) -> Tensor:
        found: Tensor = x + block.attention(block.norm_1(x))
        return found

    @staticmethod
    def perceptron(block: Any, x: Tensor) -> Tensor:
        found: Tensor = x + block.down(F.gelu(block.up(block.norm_2(x))))
        return found

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.layer(block, x)
        x = self.norm(x).flatten(0, 1)
        if self.tiles_logits:
            options = nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(x, self.head.weight, targets.flatten(), options=options)
        return F.cross_entropy(self.head(x).float(), targets.flatten())


class Peak(threading.Thread):
    """The most memory that this process has had, looked at a hundred times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(SAMPLE_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, memory_bytes("self"))


def build(said: dict[str, Any]) -> Long:
    does = WAYS[said["way"]]
    shape = SHAPES[said["size"]]
    shape = replace(shape, layers=said["layers"] or shape.layers)
    budgets: dict[str, Any] = {"host_budget": said["host_budget"] - said["activation_budget"]}
    if "activations" in does:  # the model has as much as without
        budgets = {"host_budget": said["host_budget"], "activation_budget": said["activation_budget"]}
        budgets["offload_activations"] = "nvme"
    with deepoffload.offload_context(nvme_path=said["path"], precision="bf16", **budgets):
        model = Long(shape, said["tokens"])
        if said["window"]:
            for block in model.blocks:
                block.attention = Windowed(block.attention, said["window"])
        model.tiles_logits, model.tiles_perceptron = "logits" in does, "perceptron" in does
        fill(model)
    return model


def main() -> None:
    said = json.loads(sys.argv[1])
    torch.set_num_threads(said["threads"])
    model = build(said)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4)
    watch = Peak()
    losses, seconds, gradients = [], [], []
    for number in range(-2, said["steps"]):
        if number == 0:
            watch.start()
        begin_s = time.perf_counter()
        loss = model(*tokens_of(number, 1, said["tokens"] // (WARM_UP if number < 0 else 1)))
        loss.backward()
        if number == 0:
            gradients = [zlib.crc32(param.grad.contiguous().view(torch.uint8).numpy()) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin_s)
        losses.append(loss.item())
        if number < 0:
            before = dict(deepoffload.stats(model))
    watch.over.set()
    watch.join()
    stats = deepoffload.stats(model)
    names = ("activation_bytes_written", "activation_bytes_read")
    moved = sum(stats.get(name, 0) - before.get(name, 0) for name in names)
    found = {"way": said["way"], "losses": losses, "seconds": seconds[2:], "peak_bytes": watch.peak_bytes}
    found |= {"gradients": gradients, "activation_bytes": moved / said["steps"], "stats": stats}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
