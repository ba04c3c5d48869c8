"""What a process takes at most while ``deepoffload.paged`` steps 10.5 M parameters; ``SWAP_DIRECTORY CLASS``; JSON in
MiB, last."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import deepoffload
from tests.support.inspect import tiers_of
from tests.support.memory_watch import MemoryWatch, give_back, populate

WIDTH, DEPTH, BUDGET_BYTES = 1024, 10, 48 << 20


def main(swap: str, name: str) -> None:
    watch = MemoryWatch()
    with deepoffload.offload_context(host_budget=BUDGET_BYTES, nvme_path=swap):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    optimizer = deepoffload.paged(getattr(torch.optim, name), model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH)
    torch.mm(x, x.T)
    populate(tiers_of(model).arena)
    give_back()
    before = watch.take_peak()
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    facts = {"above": (watch.take_peak() - before) / 2**20, "losses": losses, "stats": deepoffload.stats(model)}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
