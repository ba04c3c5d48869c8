"""Predictions against what really happens: peak memory within a tenth, bytes on NVMe exactly.

Every run trains a decoder for two steps in a separate process, over precisions, budgets, checkpointing,
accumulation, overlap of the update and tiers. ``ESTIMATES=all`` trains more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepoffload.config import Config, Precision, StepOverlap, parse_config
from deepoffload.estimate import Batch, Estimate, MachineSpec, estimate
from deepoffload.estimate.decoder import DecoderShape
from deepoffload.estimate.subject import from_shape
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import measure_bandwidth

ROOT = Path(__file__).parents[2]
SHAPE = {"layers": 5, "hidden": 512, "heads": 8, "vocabulary": 4096}
STATES = {"bf16": 14, "fp32": 16, "fp16": 16}
"""Bytes per parameter of weights, gradients and optimizer state."""


def adamw(state_dtype: str) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"state_dtype": state_dtype}}


GRID: tuple[dict[str, Any], ...] = (
    {"precision": "bf16", "share": 1.5, "batch": 4},
    {"precision": "bf16", "share": 0.5, "batch": 2, "accumulation": 2},
    {"precision": "bf16", "share": 0.25, "batch": 4},
    {"precision": "bf16", "share": 0.6, "batch": 4, "checkpointing": True},
    {"precision": "bf16", "share": 0.6, "batch": 2, "config": {"offload_param": "cpu"}},
    {"precision": "bf16", "share": 0.3, "batch": 2, "accumulation": 3, "config": {"step_overlap": "none"}},
    {"precision": "fp32", "share": 0.5, "batch": 2, "accumulation": 3, "config": {"accumulation_order": "vertical"}},
    {"precision": "fp32", "share": 0.3, "batch": 4},
    {"precision": "bf16", "share": 0.3, "batch": 2, "config": {"step_overlap": "in_backward"}},
    {"precision": "bf16", "share": 0.25, "batch": 2, "config": {"optimizer": adamw("8bit")}},
    {"precision": "bf16", "share": 0.4, "batch": 2, "config": {"optimizer": adamw("bf16")}},
    {"precision": "fp16", "share": 0.4, "batch": 1, "length": 16},  # a CPU takes ten times as long for fp16
)
MORE: tuple[dict[str, Any], ...] = (
    {"precision": "bf16", "share": 0.8, "batch": 2},
    {"precision": "bf16", "share": 0.25, "batch": 4, "config": {"step_overlap": "none"}},
    {"precision": "fp32", "share": 1.2, "batch": 2},
    {"precision": "fp32", "share": 0.7, "batch": 2, "checkpointing": True},
    {"precision": "fp32", "share": 0.3, "batch": 2, "config": {"step_overlap": "none"}},
    {"precision": "fp32", "share": 0.3, "batch": 2, "config": {"optimizer": adamw("8bit")}},
)
CASES = GRID + MORE if os.environ.get("ESTIMATES") == "all" else GRID


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    whole = {"shape": SHAPE, "length": 64, "checkpointing": False, "accumulation": 1, "config": {}} | case
    subject = from_shape(DecoderShape(**SHAPE), Batch(1, 8))
    budget = int(subject.num_parameters * STATES[whole["precision"]] * whole["share"])
    # Two steps are too few for guesses to begin by themselves.
    return whole | {"config": {"step_overlap": "deferred", **whole["config"], "host_budget": budget}}


def predicted(settings: dict[str, Any], process_bytes: int, nvme_path: Path) -> Estimate:
    config: Config = replace(
        parse_config(settings["config"], precision=settings["precision"], nvme_path=["/tmp"]),
        gradient_accumulation_steps=settings["accumulation"],
    )
    assert config.precision is Precision(settings["precision"])
    assert config.step_overlap is StepOverlap(settings["config"].get("step_overlap"))
    subject = from_shape(
        DecoderShape(**settings["shape"]),
        Batch(settings["batch"], settings["length"]),
        checkpointing=settings["checkpointing"],
    )
    with IoEngine() as engine:  # what the engine has decided with: it was measured in the run and kept
        disk = measure_bandwidth(nvme_path, engine)
    machine = MachineSpec(
        host_memory_bytes=1 << 40,
        nvme_bytes=1 << 40,
        nvme_read_bytes_per_s=disk.read_bytes_per_s,
        nvme_write_bytes_per_s=disk.write_bytes_per_s,
        nvme_mixed_bytes_per_s=disk.mixed_bytes_per_s,
        process_bytes=process_bytes,
    )
    return estimate(subject, machine, config)


@pytest.fixture(scope="module")
def runs(nvme_path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings, and what happened."""
    every = [settings_of(case) for case in CASES]
    command = [sys.executable, str(ROOT / "tests" / "estimate" / "child.py"), str(nvme_path), json.dumps(every)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return list(zip(every, map(json.loads, done.stdout.splitlines()), strict=True))


def test_the_grid_is_large_enough_and_uses_all_tiers(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    assert len(runs) >= 12
    on_disk = [found["stats"]["nvme_bytes"] for _, found in runs]
    assert min(on_disk) == 0 and max(on_disk) > 100e6


@pytest.mark.parametrize("number", range(len(CASES)))
def test_peak_of_host_memory_and_bytes_on_nvme(
    runs: list[tuple[dict[str, Any], dict[str, Any]]], number: int, nvme_path: Path
) -> None:
    settings, found = runs[number]
    expected = predicted(settings, found["process_bytes"], nvme_path)
    assert expected.memory is not None and expected.step is not None
    assert expected.blocks is not None
    assert expected.blocks.placement.table().splitlines()[:6] == found["placement"].splitlines()[:6]
    assert expected.memory.host_bytes == pytest.approx(found["peak_bytes"], rel=0.1)
    said = {row.name: row.nvme for row in expected.memory.rows if row.name in found["paged_nvme_bytes"]}
    assert said == found["paged_nvme_bytes"]
    assert found["stats"]["nvme_bytes"] == expected.memory.nvme_bytes
    assert found["stats"]["nvme_capacity_bytes"] >= expected.memory.nvme_bytes
