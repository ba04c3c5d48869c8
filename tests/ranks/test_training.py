"""Several ranks train to the bits of one process that accumulates all their micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training_programs import Job, check_same

ALL_IN_MEMORY: dict[str, Any] = {"host_budget": "64MiB"}


@pytest.mark.parametrize(
    ("world_size", "dtype", "transport"),
    [(2, "fp32", "memory"), (2, "bf16", "group"), (4, "bf16", "memory"), (4, "fp32", "group")],
)
def test_a_gpt_with_everything_in_memory(world_size: int, dtype: str, transport: str) -> None:
    config = {**ALL_IN_MEMORY, "precision": dtype, "ranks": {"transport": transport}}
    check_same(Job(data_ranks=world_size, config=config))


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral", "t5", "gpt-checkpointed", "gpt-reentrant"])
def test_families(model: str) -> None:
    check_same(Job(model=model, config=ALL_IN_MEMORY))


@pytest.mark.parametrize(("stage", "step_overlap"), [(1, "deferred"), (2, "none"), (3, "deferred")])
def test_stages(stage: int, step_overlap: str) -> None:
    said = {"zero_optimization": {"stage": stage}}
    check_same(Job(config={**ALL_IN_MEMORY, **said, "step_overlap": step_overlap}, micro_batches=3))


@pytest.mark.parametrize("step_overlap", ["deferred", "none"])
def test_state_on_nvme(step_overlap: str, tmp_path: Path) -> None:
    config = {"host_budget": "1400KiB", "nvme_budget": "64MiB", "precision": "bf16", "step_overlap": step_overlap}
    for found in check_same(Job(config=config, micro_batches=2), str(tmp_path)):
        assert found.stats["disk_bytes_written"] > 0
    assert not list(tmp_path.iterdir())


def test_everything_is_evicted_always_and_poisoned(tmp_path: Path) -> None:
    debug = {"evict_always": True, "poison": True}
    config = {"host_budget": "8MiB", "nvme_budget": "64MiB", "debug": debug}
    check_same(Job(config=config, micro_batches=2), str(tmp_path))


def test_torch_clips() -> None:
    check_same(Job(torch_clips=True, config=ALL_IN_MEMORY))


def test_fp16_with_a_scaled_loss() -> None:
    check_same(Job(scale=1024.0, clip=None, config={**ALL_IN_MEMORY, "precision": "fp16"}))
