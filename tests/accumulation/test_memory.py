"""What the process takes in vertical order, apart from tensors."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from tests.accumulation.loops import VERTICAL
from tests.support.inspect import pager_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.models import batch
from tests.support.paging import TIGHT, Paging

COUNT = 12
PIECES, PIECE_BYTES = 8, 6 << 20
MAPPED_BYTES = 24 << 20
"""Once so large a tensor was freed, glibc keeps all smaller ones in heaps, of which each thread has its own."""


class Working(nn.Module):
    """A layer that has large tensors while it runs, between small ones that live until the call is over."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.small: list[Tensor] = []
        self.peak_bytes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.layers[0](x)
        large = []
        for _ in range(PIECES):
            large.append(torch.ones(PIECE_BYTES, dtype=torch.uint8))
            self.small.append(torch.ones(16 << 10, dtype=torch.uint8))
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        del large
        return self.layers[1](x).square().mean()


def test_a_parked_micro_batch_keeps_no_memory_that_it_has_freed(paging: Paging) -> None:
    """The process needs the working memory of a few micro-batches, not that of all."""
    model: Any = paging.build(Working, TIGHT)
    torch.ones(MAPPED_BYTES, dtype=torch.uint8)  # and freed at once
    give_back()
    start_bytes = resident_bytes()
    deepoffload.accumulate(model, [batch(micro) for micro in range(COUNT)], order=VERTICAL, activations="recompute")
    assert len(model.small) == COUNT * PIECES, "the large tensors of each micro-batch were there"
    assert model.peak_bytes - start_bytes < COUNT * PIECES * PIECE_BYTES / 2


def test_a_call_leaves_nothing_to_the_garbage_collector(paging: Paging) -> None:
    """It would have to be called in each step, and goes through all objects of the program now and then. The
    hooks of a call do not make windows look at modules again."""
    model: Any = paging.build(Working, TIGHT)
    found = []
    try:
        for _ in range(3):
            gc.collect()
            gc.disable()
            hooks = pager_of(model).hooks.own.others()
            deepoffload.accumulate(model, [batch(micro) for micro in range(3)], order=VERTICAL, activations="auto")
            found.append((gc.collect(), pager_of(model).hooks.own.others() - hooks))
    finally:
        gc.enable()
    assert found[1:] == [(0, 0), (0, 0)]
