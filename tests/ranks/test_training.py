"""Several ranks train to the bits of one process that accumulates all their micro-batches.

``python -m tests.ranks.matrix`` trains every combination.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks.matrix import cell
from tests.ranks.training_programs import Job, check_all

ALL_IN_MEMORY: dict[str, Any] = {"host_budget": "64MiB"}
ON_DISK = {"host_budget": "1400KiB", "nvme_budget": "64MiB", "precision": "bf16"}
ALWAYS_EVICTED = {"host_budget": "8MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True, "poison": True}}
VERTICAL = {"accumulation_order": "vertical", "activations": "recompute", "zero_optimization": {"stage": 3}}


def test_a_gpt_on_two_ranks(tmp_path: Path) -> None:
    jobs = [
        cell("gpt", "fp32", "memory", "memory", "deferred", stage=1, micro_batches=3),
        cell("gpt", "bf16", "group", "memory", "none", stage=2, micro_batches=3),
        cell("gpt", "fp16", "memory", "memory", "deferred", stage=3),
        Job(torch_clips=True, config=ALL_IN_MEMORY),
        Job(config=ON_DISK, micro_batches=2),
        Job(config={**ON_DISK, "step_overlap": "none"}, micro_batches=2, accumulates=True),
        Job(config={**ON_DISK, **VERTICAL}, micro_batches=3, accumulates=True),
        Job("gpt-reentrant", config={**ON_DISK, **VERTICAL}, micro_batches=3, accumulates=True, steps=2),
        Job(config=ALWAYS_EVICTED, micro_batches=2),
    ]
    found = check_all(jobs, tmp_path)
    assert all(rank.stats["disk_bytes_written"] > 0 for ranks in found[4:8] for rank in ranks)


def test_families_on_two_ranks(tmp_path: Path) -> None:
    models = ("llama", "gpt2", "mixtral", "t5", "gpt-checkpointed", "gpt-reentrant")
    in_memory = [Job(model=model, config=ALL_IN_MEMORY) for model in (*models, "llama-tiles")]
    check_all([*in_memory, Job(model="gpt-tiles", micro_batches=2, steps=2, config=ALWAYS_EVICTED)], tmp_path)


def test_four_ranks(tmp_path: Path) -> None:
    jobs = [
        cell("gpt", "fp32", "group", "memory", "deferred", data_ranks=4, micro_batches=3, steps=2),
        cell("mixtral", "bf16", "memory", "least", "in_backward", data_ranks=4, steps=2),
        cell("t5", "fp16", "memory", "evicted", "deferred", data_ranks=4, steps=2),
    ]
    check_all(jobs, tmp_path, world_size=4)
