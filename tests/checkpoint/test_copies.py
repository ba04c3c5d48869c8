"""State of a device with copies of its own (``debug.copies``), saved and loaded into the host, and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from tests.checkpoint.training import STEPS, adamw, gpt, resumed, straight_and_saved
from tests.support.loops import assert_same_bits

PLACES: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "512KiB"},
    "copies": {"host_budget": "1MiB", "device_budget": 200_000, "copies": True},
    "state_on_device": {
        "host_budget": "4MiB", "device_budget": 4 << 20, "copies": True, "offload_optimizer": "device",
    },
}  # fmt: skip


def build(place: str, path: Path, seed: int) -> nn.Module:
    said = dict(PLACES[place])
    debug = {"poison": True, "copies": said.pop("copies", False)}
    with deepoffload.offload_context(device="cpu", nvme_path=str(path), precision="bf16", debug=debug, **said):
        torch.manual_seed(seed)
        return gpt()


@pytest.mark.parametrize(("one", "other"), [("copies", "host"), ("state_on_device", "host"), ("host", "copies")])
def test_there_and_back(one: str, other: str, nvme_path: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    expected = straight_and_saved(partial(build, one, nvme_path, 0), adamw, first)
    moved = build(other, nvme_path, 5)
    state = deepoffload.TrainingState(moved, adamw(moved))
    state.load(first)
    state.save(second)
    names = [path.name for path in (first / f"global_step{STEPS}").glob("*.safetensors")]
    assert len(names) == 3
    for name in names:
        files = [directory / f"global_step{STEPS}" / name for directory in (first, second)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert_same_bits(expected, resumed(partial(build, one, nvme_path, 6), adamw, second))
