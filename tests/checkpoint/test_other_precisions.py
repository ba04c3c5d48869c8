"""Durable steps that a run of another precision resumes from, and what is left of a loss scale."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch

import deepoffload
from tests.checkpoint.durable_model import Make
from tests.checkpoint.training import masters, snapshot
from tests.support.loops import assert_same_bits, nudge
from tests.support.models import TinyGPT, batch, next_token_loss

PRECISIONS = ("fp32", "bf16", "fp16")


@pytest.mark.parametrize(("before", "after"), permutations(PRECISIONS, 2))
def test_masters_and_moments_carry_over(before: str, after: str, make: Make) -> None:
    run = make(precision=before)
    for _ in range(2):
        run.step()
        run.state.commit()
    expected, moments = masters(run.model, run.optimizer), snapshot(run.model, run.optimizer)["state"]
    run.close()
    run = make(precision=after)
    assert run.state.resume() == 2
    found = masters(run.model, run.optimizer)
    frozen = expected.pop("table")
    assert_same_bits(frozen.to(run.model.table.dtype).float(), found.pop("table"))
    if after == "bf16":
        for master in expected.values():
            nudge(master)
    assert_same_bits(expected, found)
    for name, param in run.model.named_parameters():
        if name in expected:
            assert torch.equal(param, expected[name].to(param.dtype)), name
    for number, entry in snapshot(run.model, run.optimizer)["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert_same_bits(moments[number][key], entry[key])
    run.step()
    run.state.commit(wait=True)
    trained = masters(run.model, run.optimizer)
    run.close()
    run = make(precision=after)
    assert run.state.resume() == 3
    assert_same_bits(trained, masters(run.model, run.optimizer))


@pytest.mark.parametrize(
    ("before", "after", "scale"), [("bf16", "fp16", 2.0**4), ("fp16", "fp32", 1.0), ("fp16", "fp16", 2.0**5)]
)
@pytest.mark.parametrize("durable", [True, False])
def test_a_loss_scale_starts_where_there_was_none(
    before: str, after: str, scale: float, durable: bool, nvme_path: Path, tmp_path: Path
) -> None:
    def engine_of(precision: str) -> deepoffload.TrainingEngine:
        torch.manual_seed(0)
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
        config = {
            "host_budget": "400KiB",
            **({"durability": {"every": 1, "path": str(tmp_path)}} if durable else {"nvme_path": str(nvme_path)}),
            **({"fp16": fp16} if precision == "fp16" else {"precision": precision}),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine, *_ = deepoffload.initialize(model=TinyGPT(width=32, depth=3), config=config)
        return engine

    def step(engine: deepoffload.TrainingEngine, number: int) -> None:
        engine.backward(next_token_loss(engine, batch(number)))
        engine.step()

    engine = engine_of(before)
    for number in range(2):
        step(engine, number)
    if not durable:
        engine.save_checkpoint(tmp_path)
    engine.close()
    engine = engine_of(after)
    if durable:
        assert engine.resume() == 2
    else:
        engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (2, 0, scale)
    step(engine, 2)
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    engine.close()
