"""Weights and optimizer state pass the disk once per step, however many micro-batches there are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import deepoffload
from deepoffload.config import AccumulationOrder, Config, Precision
from deepoffload.estimate import Batch, MachineSpec, estimate, from_module
from tests.accumulation.loops import VERTICAL
from tests.support.models import CONTEXT, TinyGPT, batch, next_token_loss

HOST_BUDGET = 48 << 20
BYTES_PER_PARAM = 26.5
"""bf16, everything on NVMe but gradients: weights are read twice and written once, 10 bytes of state both ways."""

BYTES_OF_GUESSES_PER_PARAM = 20.6
"""The same with the optimizer's state alone on NVMe and updates on a guess: 20 of state, and what memory has no room
for of the old weights. (Here 20.31, and 21.14 where all of them are written.)"""

MORE_IS_READ_AGAIN = 1.15
"""On a slow disk some blocks that were read ahead have to leave once more before their use. Weights that each of eight
micro-batches reads would be twice as many bytes, of three a third more."""


@pytest.mark.parametrize(("micro_batches", "checkpointing"), [(1, None), (8, None), (3, True)])
def test_bytes_per_parameter_do_not_grow_with_the_micro_batches(
    nvme_path: Path, micro_batches: int, checkpointing: bool | None
) -> None:
    """Also not with reentrant checkpoints, which run units again inside backward."""
    with deepoffload.offload_context(
        host_budget=HOST_BUDGET, nvme_path=str(nvme_path), precision="bf16", aio={"backend": "pool"}
    ):
        model = TinyGPT(width=320, depth=8, checkpointing=checkpointing)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    moved, faults = [], []
    for step in range(7):  # the first one shows the order, and the planner needs some to know how long things take
        batches = [batch(100 * step + micro, rows=1) for micro in range(micro_batches)]
        deepoffload.accumulate(model, batches, next_token_loss, order=VERTICAL)
        optimizer.step()
        optimizer.zero_grad()
        stats = deepoffload.stats(model)
        moved.append(stats["disk_bytes_read"] + stats["disk_bytes_written"])
        faults.append(stats["faults"])
    # on a busy machine a block may have to leave before it is needed
    per_step = min(later - earlier for earlier, later in pairwise(moved[3:])) / num_params
    assert 20 < per_step <= MORE_IS_READ_AGAIN * BYTES_PER_PARAM
    assert faults[-1] == faults[2]
    if checkpointing is None:
        assert predicted(micro_batches) == pytest.approx(per_step, rel=MORE_IS_READ_AGAIN - 1)


def predicted(micro_batches: int) -> float:
    """Bytes per parameter and step, by the estimators."""
    with torch.device("meta"):
        model = TinyGPT(width=320, depth=8)
    subject = from_module(model, Batch(1, CONTEXT), lambda call: next_token_loss(call, batch(0, rows=1)))
    machine = MachineSpec(host_memory_bytes=1 << 40, nvme_bytes=1 << 40)
    order = AccumulationOrder.VERTICAL
    settings = {"accumulation_order": order, "gradient_accumulation_steps": micro_batches}
    step = estimate(subject, machine, Config(precision=Precision.BF16, host_budget=HOST_BUDGET, **settings)).step
    assert step is not None
    return (step.times.read_bytes + step.times.written_bytes) / subject.num_parameters


def test_guesses_write_little_of_the_weights_that_they_keep(nvme_path: Path) -> None:
    """What weights in memory were is wanted until the step alone, so the last ones of a backward need not go to NVMe.
    If all did, half of the state being updated on a guess, it would be a byte more."""
    num_params = sum(param.numel() for param in TinyGPT(width=256, depth=24).parameters())
    with deepoffload.offload_context(
        host_budget=int(4.04 * num_params) + 10 * num_params // 8,
        nvme_path=str(nvme_path),
        precision="bf16",
        step_overlap="speculative",
        offload_param="cpu",
        aio={"backend": "pool"},
    ):
        model = TinyGPT(width=256, depth=24)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1e6)
    moved = []
    for step in range(8):
        deepoffload.accumulate(model, [batch(step, rows=1)], next_token_loss)
        optimizer.step()
        optimizer.zero_grad()
        stats = deepoffload.stats(model)
        moved.append(stats["disk_bytes_read"] + stats["disk_bytes_written"])
    per_step = min(later - earlier for earlier, later in pairwise(moved[3:])) / num_params
    assert stats["speculated"] and not stats["rolled_back"]
    assert 19.5 < per_step <= BYTES_OF_GUESSES_PER_PARAM
