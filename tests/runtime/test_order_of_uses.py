"""The order of uses that the estimators play is the one in which the engine uses blocks, event by event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.estimate.blocks import Planner
from deepoffload.estimate.dry_run import dry_run
from deepoffload.runtime.compute_types import compute_types
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.plan import NO_DISK
from deepoffload.schedule.cost_model import AccumulationOrder, StepOverlap, Workload
from deepoffload.schedule.events import Event
from deepoffload.schedule.uses import step_uses, unit_blocks
from tests.support.inspect import pager_of, tiers_of
from tests.support.models import TinyGPT, batch, gpt2, llama, next_token_loss
from tests.support.paging import Paging, Setting, plain

VERTICAL, HORIZONTAL = AccumulationOrder.VERTICAL, AccumulationOrder.HORIZONTAL


class SharedLayers(nn.Module):
    """A layer that is called twice, weights that two modules share, and weights of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 24)
        self.twice = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.one = nn.Linear(24, 24)
        self.other = nn.Linear(24, 24)
        self.other.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(24))
        self.head = nn.Linear(24, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.embedding(tokens)) * self.scale
        return self.head(self.other(self.twice(self.one(x))) + self.scale)


def partly_frozen() -> nn.Module:
    model = TinyGPT()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("blocks.1", "blocks.2.attention", "norm")))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": TinyGPT,
    "gpt, checkpoints": partial(TinyGPT, checkpointing=False),
    "gpt, reentrant checkpoints": partial(TinyGPT, checkpointing=True),
    "gpt, partly frozen": partly_frozen,
    "shared layers": SharedLayers,
    "llama": llama,
    "gpt2": gpt2,
}


def recorded(model: nn.Module, workload: Workload) -> list[list[Event]]:
    """The events of each of three steps; of six where the first ones only teach which gradient is the last."""
    engine, micro_batches = engine_of(model), workload.accumulation_steps
    optimizer = deepoffload.CPUAdam([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    steps: list[list[Event]] = []
    observe = pager_of(engine).order.trace.observe

    def noted(event: Event) -> bool:
        steps[-1].append(event)
        return observe(event)

    pager_of(engine).order.trace.observe = noted  # type: ignore[method-assign]
    for step in range(6 if workload.step_overlap is StepOverlap.SPECULATIVE else 3):
        steps.append([])
        batches = [batch(10 * step + micro) for micro in range(micro_batches)]
        if workload.order is AccumulationOrder.VERTICAL:
            deepoffload.accumulate(model, batches, next_token_loss, order=workload.order.value)
            batches = []
        for micro, tokens in enumerate(batches):
            if engine.gradients.early is not None:
                engine.gradients.early.paused = micro < micro_batches - 1
            next_token_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    pager_of(engine).order.trace.observe = observe  # type: ignore[method-assign]
    return steps


CASES = [
    *((name, 1, HORIZONTAL, 1.6) for name in MODELS),
    ("gpt", 2, HORIZONTAL, 4.0),
    ("shared layers", 2, HORIZONTAL, 1.6),
    ("llama", 3, VERTICAL, 1.6),
]


@pytest.mark.parametrize(
    ("name", "micro_batches", "order", "room", "overlap"),
    [
        pytest.param(*case, overlap, id=f"{'-'.join(map(str, case))}-{overlap.value}")
        for turn, case in enumerate(CASES)
        for number, overlap in enumerate(StepOverlap)
        if case[0] == "gpt" or turn % len(StepOverlap) == number
    ],
)
def test_the_engine_uses_blocks_in_the_order_that_is_foreseen(
    paging: Paging, name: str, micro_batches: int, order: AccumulationOrder, room: float, overlap: StepOverlap
) -> None:
    build = MODELS[name]
    if overlap is StepOverlap.SPECULATIVE:
        room = max(room, 2.5)  # so that there is room for what guesses keep
    setting = Setting(str(room), room, step_overlap=overlap.value)
    model = paging.build(build, setting, gradient_accumulation_steps=micro_batches)
    workload = Workload(micro_batches, overlap, order=order)
    steps = recorded(model, workload)

    engine, reference = engine_of(model), plain(build)
    plan = Planner(reference, engine.config).plan(
        capacity_bytes=engine.budgets.host_bytes,
        nvme_bytes=1 << 40,
        bandwidths=NO_DISK,
    )
    run = dry_run(
        reference,
        lambda call: next_token_loss(call, batch(0)),
        windows=plan.modules,
        unit_of=plan.unit_of,
        types=compute_types(engine.config, [reference]),
    )
    names = {block.id: block.name for block in tiers_of(engine).blocks()}
    foreseen_names = {block.id: block.name for block in plan.placement.blocks}
    for number, step in enumerate(steps):
        if overlap is StepOverlap.SPECULATIVE and 0 < number < len(steps) - 1:
            continue
        units = unit_blocks(plan.placement.blocks, plan.placement.resident)
        uses = step_uses(run.visits, units, workload, first=number == 0)
        foreseen = [(use.use.event.key, [foreseen_names[block] for block in use.use.event.blocks]) for use in uses]
        assert [(event.key, [names[block] for block in event.blocks]) for event in step] == foreseen
    assert steps[-2] == steps[-1]
    if overlap is StepOverlap.SPECULATIVE:
        stats = deepoffload.stats(model)
        assert stats["speculated"] > 0 and stats["rolled_back"] == stats["speculation_left"] == 0
