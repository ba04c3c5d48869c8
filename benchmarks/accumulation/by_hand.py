"""What the order alone costs: both orders in plain PyTorch, written by hand for one model, everything in memory.

In vertical order the activations of all micro-batches are there before the first backward, so fewer of them are still
in the processor's caches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accumulation.row import ORDERS, WARM_UP
from benchmarks.common.gpt import GPT, SHAPES, fill, tokens_of
from benchmarks.end_to_end.meter import read_counters

Batch = tuple[Tensor, Tensor]


def horizontal(model: GPT, batches: list[Batch]) -> None:
    for batch in batches:
        (model(*batch) / len(batches)).backward()


def vertical(model: GPT, batches: list[Batch]) -> None:
    """Layer by layer; the graph is cut where a micro-batch enters a layer."""
    values = [model.embedding(tokens) + model.position(torch.arange(tokens.shape[1])) for tokens, _ in batches]
    cuts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batches]
    for block in model.blocks:
        for number, entering in enumerate(values):
            leaf = entering.detach().requires_grad_()
            cuts[number].append((entering, leaf))
            values[number] = block(leaf)
    for number, (_, targets) in enumerate(batches):
        leaf = values[number].detach().requires_grad_()
        cuts[number].append((values[number], leaf))
        logits = model.head(model.norm(leaf)).float().flatten(0, 1)
        (F.cross_entropy(logits, targets.flatten()) / len(batches)).backward()
        del logits
    values.clear()
    for _ in range(len(model.blocks) + 1):
        for micro in cuts:
            entering, leaf = micro.pop()
            entering.backward(leaf.grad)


def measure(model: GPT, said: dict[str, Any], count: int) -> dict[str, Any]:
    """As ``row.Row.measure``. Gradients are added up and zeroed; there is no update."""
    rounds: dict[str, list[Any]] = {order: [] for order in ORDERS}
    number = 0
    for _ in range(said["rounds"]):
        for order in ORDERS:
            steps = []
            for _ in range(WARM_UP + said["steps"]):
                number += 1
                batches = [tokens_of(number * count + micro, 1, said["seq"]) for micro in range(count)]
                before, begin_s = read_counters(), time.perf_counter()
                (vertical if order == "vertical" else horizontal)(model, batches)
                seconds, used = time.perf_counter() - begin_s, read_counters() - before
                foreign = max(0.0, used.busy_cpu_s - used.own_cpu_s) / seconds / (os.cpu_count() or 1)
                steps.append({"seconds": seconds, "bytes": 0.0, "foreign_cpu_share": foreign})
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.zero_()
            rounds[order].append(steps[WARM_UP:])
    return {"row": said["row"], "k": count, "rounds": rounds}


def main() -> None:
    said = json.loads(sys.argv[1])
    torch.set_num_threads(said["threads"])
    model = GPT(SHAPES[said["size"]], said["seq"])
    fill(model)
    model.to(torch.bfloat16)
    for count in said["micro_batches"]:
        print(json.dumps(measure(model, said, count)), flush=True)


if __name__ == "__main__":
    main()
