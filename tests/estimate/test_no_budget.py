"""Without a budget the engine and the estimators take the same, and place the model in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepoffload
from deepoffload.config import Config, Precision
from deepoffload.config.resolve import resolve_budgets
from deepoffload.device import Device, Tier
from deepoffload.estimate import Batch, MachineSpec, estimate
from deepoffload.estimate.decoder import Decoder, DecoderShape
from deepoffload.estimate.subject import from_shape
from deepoffload.machine import DiskSpace, Machine

GIB = 1 << 30
SHAPE = DecoderShape(layers=3, hidden=128, heads=2, vocabulary=512)


@pytest.mark.parametrize("nvme_budget", [None, 0, 5 * GIB])
@pytest.mark.parametrize("host_budget", [None, 2 * GIB])
@pytest.mark.parametrize("offload_param", [None, Tier.HOST, Tier.NVME])
def test_the_budgets_are_those_of_the_engine(nvme_budget, host_budget, offload_param):
    config = Config(
        precision=Precision.BF16,
        host_budget=host_budget,
        nvme_budget=nvme_budget,
        nvme_path=("/a",),
        offload_param=offload_param,
        offload_optimizer=offload_param,
    )
    available = Machine(64 * GIB, 20 * GIB, 4, (DiskSpace("/a", 100 * GIB, 1),))
    resolved = resolve_budgets(config, available, Device.parse("cpu"))
    # what is available is what the process has left
    spec = MachineSpec(host_memory_bytes=20 * GIB + (220 << 20), nvme_bytes=100 * GIB, process_bytes=220 << 20)
    found = estimate(from_shape(SHAPE, Batch(1, 8)), spec, config)
    assert found.blocks is not None
    assert found.capacity_bytes == resolved.host_bytes
    assert (found.blocks.placement.nvme_capacity_bytes or 0) == resolved.nvme_bytes


def test_the_placement_is_that_of_the_engine(nvme_path: Path):
    torch.manual_seed(0)
    with deepoffload.offload_context(precision="bf16", nvme_path=str(nvme_path)) as context:
        model = Decoder(SHAPE)
    engine = context.engine
    assert engine is not None and engine.placement is not None
    try:
        spec = MachineSpec(host_memory_bytes=int(engine.budgets.host_bytes / 0.7) + 1, process_bytes=0, nvme_bytes=GIB)
        found = estimate(from_shape(SHAPE, Batch(1, 8)), spec, engine.config)
        assert found.blocks is not None
        assert found.blocks.placement.table().splitlines()[:5] == engine.placement.table().splitlines()[:5]
        assert found.capacity_bytes == pytest.approx(engine.budgets.host_bytes, abs=4096)
    finally:
        engine.close()
    assert model is not None
