"""Optimizers that the configuration names: the same bits as the class itself, whenever the update runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows

SECTIONS: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
    (
        {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
        deepoffload.CPUAdam,
        {"adamw_mode": False},
    ),
    ({"type": "AdamW", "params": {"state_dtype": "8bit"}}, deepoffload.CPUAdam, {}),
    ({"type": "AdamW", "params": {"amsgrad": True}}, deepoffload.CPUAdam, {}),
    ({"type": "Lion", "params": {"lr": 1e-3, "fp32_optimizer_states": False}}, deepoffload.CPULion, {}),
    ({"type": "Adagrad", "params": {"initial_accumulator_value": 0.1}}, deepoffload.CPUAdagrad, {}),
    ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}, deepoffload.CPUSGD, {}),
]


@pytest.mark.parametrize("overlap", ["none", "deferred"])
@pytest.mark.parametrize(("section", "kind", "renamed"), SECTIONS, ids=lambda value: str(value)[:60])
def test_the_class_that_is_meant(
    nvme_path: Path, section: dict[str, Any], kind: Any, renamed: dict[str, Any], overlap: str
) -> None:
    torch.manual_seed(0)
    model, twin = mlp(depth=4), mlp(depth=4)
    twin.load_state_dict(model.state_dict())
    settings = {key: value for key, value in section["params"].items() if key != "adam_w_mode"} | renamed
    reference = kind(twin.parameters(), max_grad_norm=0.5, **settings)
    config = {
        "host_budget": "256KiB",
        "nvme_path": str(nvme_path),
        "gradient_clipping": 0.5,
        "step_overlap": overlap,
        "optimizer": section,
        "debug": {"poison": True, "evict_always": True},
    }
    engine, optimizer, _, _ = deepoffload.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        assert type(optimizer) is kind
        for step in range(4):
            engine.backward(engine(rows(seed=step)).square().mean())
            engine.step()
            twin(rows(seed=step)).square().mean().backward()
            reference.step()
            reference.zero_grad()
        assert_same_bits(weights_of(twin), weights_of(model))
    finally:
        engine.close()
