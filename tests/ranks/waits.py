"""What the ranks of the tests of reports and of ``no_sync`` do."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.runtime.context import engine_of
from deepoffload.timeline import Lane
from tests.ranks.saving import built, digests, rank, train
from tests.support.models import VOCABULARY, TinyGPT

SLOW_S = 0.4


def train_with_a_slow_rank() -> tuple[dict[str, float], str, set[str], list[dict[str, float]]]:
    """Rank 1 does something else between its five steps."""
    with built({"host_budget": "32MiB", "timeline": True}) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            time.sleep(SLOW_S * rank())
        engine = engine_of(model)
        assert engine.timeline is not None
        lanes = {span.lane.value for span in engine.timeline.spans()}
        summary = engine.summary()
        everybody = deepoffload.stats(model, all_ranks=True)
        assert isinstance(everybody, list)
        return dict(summary.waited_for_ranks), summary.table(), lanes, everybody


LANES = {lane.value for lane in (Lane.GATHER, Lane.REDUCE, Lane.ROUND, Lane.WAIT)}


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def accumulate(how: str) -> list[Any]:
    """Three micro-batches a step, each with other data on each rank: by calls, all but the last inside ``no_sync`` or
    outside, or by ``train_batch`` in an order."""
    torch.manual_seed(11)
    config = {
        "gradient_accumulation_steps": 3,
        "train_micro_batch_size_per_gpu": 2,
        "host_budget": "32MiB",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2 if how == "vertical" else 3},
    }
    engine = deepoffload.initialize(model=TinyGPT(dropout=0.0), config=config)[0]
    found: list[Any] = []
    for step in range(2):
        seeds = [100 * step + 10 * micro + rank() for micro in range(3)]
        batches = [torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(s)) for s in seeds]
        if how in ("vertical", "horizontal"):
            engine.train_batch(iter(batches), loss_of, order=how)
        for micro, tokens in enumerate(batches if how in ("no_sync", "outside") else ()):
            loss = loss_of(engine, tokens)
            with engine.no_sync() if how == "no_sync" and micro < 2 else contextlib.nullcontext():
                engine.backward(loss)
            engine.step()
        found.append(engine.get_global_grad_norm())
    found += [digests(engine.module.state_dict()), engine.global_steps, engine.micro_steps]
    engine.close()
    return found


def reads_of_gradients(path: str) -> list[int]:
    """How often each layer's gradients are read from NVMe in four steps of three micro-batches."""
    torch.manual_seed(0)
    with offload_context({"host_budget": "6MiB", "nvme_path": path, "timeline": True, "step_overlap": "deferred"}):
        model = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(20)))
    optimizer = CPUAdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        for _ in range(3):
            model(torch.randn(4, 192)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    assert engine.timeline is not None
    reads = Counter(span.name for span in engine.timeline.spans() if span.lane is Lane.READ)
    engine.close()
    return [count for name, count in reads.items() if name.endswith(".grad")]


def both_reports(path: str) -> tuple[Any, list[int]]:
    return train_with_a_slow_rank(), reads_of_gradients(path)


def accumulate_in_every_way() -> list[list[Any]]:
    return [accumulate(how) for how in ("no_sync", "outside", "horizontal", "vertical")]
