"""Optimizer state is planned in the layout that it will have: nothing is laid out again when training begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from deepoffload.config import Config, OptimizerConfig, Precision, StepOverlap
from deepoffload.estimate import Batch, MachineSpec, estimate, from_counts
from deepoffload.schedule.cost_model import BlockKind
from deepoffload.schedule.guess_room import GUESSES, kept_bytes
from tests.support.inspect import units_of
from tests.support.models import mlp, rows

SECTIONS: list[dict[str, Any]] = [
    {"type": "AdamW", "params": {}},
    {"type": "AdamW", "params": {"state_dtype": "8bit"}},
    {"type": "Adam", "params": {"state_dtype": "bf16"}},
    {"type": "Adam", "params": {"fp32_optimizer_states": False}},
    {"type": "AdamW", "params": {"amsgrad": True}},
    {"type": "Lion", "params": {"state_dtype": "bf16"}},
    {"type": "Lion", "params": {}},
    {"type": "Adagrad", "params": {}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
]


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section)[:60])
def test_pieces_are_planned_as_the_optimizer_needs_them(
    nvme_path: Path, section: dict[str, Any], precision: str
) -> None:
    torch.manual_seed(0)
    config = {"host_budget": "512KiB", "nvme_path": str(nvme_path), "precision": precision, "optimizer": section}
    model = mlp(depth=4)
    engine, _, _, _ = deepoffload.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        units = units_of(model)
        planned = [[piece.block.id for piece in unit.pieces] for unit in units]
        assert any(planned)
        for step in range(2):
            engine.backward(engine(rows(step).to(next(model.parameters()).dtype)).float().pow(2).mean())
            engine.step()
        assert [[piece.block.id for piece in unit.pieces] for unit in units] == planned
    finally:
        engine.close()


BYTES = {
    ("bf16", "fp32"): 10,
    ("bf16", "bf16"): 6,
    ("bf16", "8bit"): 4,
    ("fp32", "fp32"): 8,
    ("fp32", "8bit"): 2,
    ("fp16", "fp32"): 12,
    ("fp16", "8bit"): 6,
}
"""Of optimizer state per parameter: what completes the weight to its fp32 master, and two moments."""


@pytest.mark.parametrize(("precision", "state_dtype"), BYTES)
def test_estimates_are_of_that_layout(precision: str, state_dtype: str) -> None:
    subject = from_counts(10_000_000, 4, 256, Batch(1, 16), vocabulary=1000)
    config = Config(precision=Precision(precision), optimizer=OptimizerConfig("adamw", {"state_dtype": state_dtype}))
    found = estimate(subject, MachineSpec(host_memory_bytes=1 << 34), config)
    assert found.blocks is not None
    state = found.blocks.kind_bytes(BlockKind.STATE, found.blocks.placement.resident)
    # 8-bit arrays have a scale of four bytes for every 256 values
    scales = 2 * 4 / 256 if state_dtype == "8bit" else 0
    assert state == pytest.approx(subject.num_parameters * (BYTES[precision, state_dtype] + scales), rel=0.01)


def test_fewer_bytes_of_state_make_a_step_on_disk_shorter() -> None:
    subject = from_counts(20_000_000, 4, 256, Batch(1, 64), vocabulary=1000)
    machine = MachineSpec(nvme_bytes=1 << 40, nvme_read_bytes_per_s=5e8, nvme_write_bytes_per_s=5e8,
                          nvme_mixed_bytes_per_s=5e8)  # fmt: skip
    seconds = []
    for state_dtype in ("fp32", "bf16", "8bit"):
        optimizer = OptimizerConfig("adamw", {"state_dtype": state_dtype})
        config = Config(precision=Precision.BF16, host_budget=60 << 20, optimizer=optimizer)
        step = estimate(subject, machine, config).step
        assert step is not None
        seconds.append(step.seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[2] < 0.8 * seconds[0]


def test_an_update_inside_backward_moves_no_gradients() -> None:
    subject = from_counts(20_000_000, 4, 256, Batch(1, 64), vocabulary=1000)
    machine = MachineSpec(nvme_bytes=1 << 40)
    steps = {}
    for overlap in StepOverlap:
        config = Config(precision=Precision.BF16, host_budget=60 << 20, step_overlap=overlap)
        step = estimate(subject, machine, config).step
        assert step is not None
        steps[overlap] = step
    assert steps[StepOverlap.IN_BACKWARD].times.written_bytes < steps[StepOverlap.NONE].times.written_bytes
    computed = [step.compute_s for step in steps.values()]
    assert max(computed) == pytest.approx(min(computed))


@pytest.mark.parametrize("overlap", [StepOverlap.DEFERRED, StepOverlap.SPECULATIVE, None])
def test_memory_has_the_disk_space_that_guesses_keep(overlap: StepOverlap | None) -> None:
    subject = from_counts(20_000_000, 4, 256, Batch(1, 64), vocabulary=1000)
    machine = MachineSpec(nvme_bytes=1 << 40, nvme_read_bytes_per_s=2e8, nvme_write_bytes_per_s=2e8,
                          nvme_mixed_bytes_per_s=2e8)  # fmt: skip
    found = estimate(subject, machine, Config(precision=Precision.BF16, host_budget=60 << 20, step_overlap=overlap))
    assert found.memory is not None and found.blocks is not None and found.step is not None
    assert found.step.step_overlap is (overlap or StepOverlap.SPECULATIVE), "guesses pay on this disk"
    kept = [row.nvme for row in found.memory.rows if row.name == GUESSES]
    assert kept == ([] if overlap is StepOverlap.DEFERRED else [kept_bytes(found.blocks.placement)])
    assert all(nbytes > found.memory.nvme_bytes // 10 for nbytes in kept)
