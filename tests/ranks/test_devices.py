"""Several ranks, each with a device of its own: the bits of one process on such a device, and no missing wait.

The device is simulated. It holds what is copied back until something waits for it, and fails where nothing orders two
accesses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.ranks.matrix import cell
from tests.ranks.training_programs import LEAST, Job, check_all

ROOMY: dict[str, Any] = {"host_budget": "64MiB"}
TIGHT = {"host_budget": LEAST, "nvme_budget": "64MiB", "device_budget": "320KiB", "precision": "bf16"}
EVICTED = {"host_budget": "16MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True, "poison": True}}
VERTICAL = {"accumulation_order": "vertical", "activations": "recompute"}


def on_device(*jobs: Job) -> list[Job]:
    return [replace(job, device="simgpu") for job in jobs]


def test_a_gpt(tmp_path: Path) -> None:
    jobs = on_device(
        cell("gpt", "fp32", "memory", "memory", "none", micro_batches=3),
        cell("gpt", "bf16", "group", "least", "deferred", micro_batches=2),
        cell("gpt", "fp16", "memory", "evicted", "deferred"),
        cell("gpt", "bf16", "memory", "evicted", "in_backward", micro_batches=2),
        cell("gpt", "bf16", "memory", "least", "speculative"),
        Job(config={**EVICTED, "step_overlap": "speculative"}),
        Job(torch_clips=True, config=ROOMY),
        Job(config=TIGHT, micro_batches=2),
        Job(config={**TIGHT, **VERTICAL}, micro_batches=3, accumulates=True),
    )
    found = check_all(jobs, tmp_path)
    assert all(rank.stats["device_evictions"] > 0 for rank in found[7])


def test_what_programs_do(tmp_path: Path) -> None:
    jobs = on_device(
        *(Job(config=EVICTED, between_steps=what) for what in ("evaluation", "looks", "edits", "gradient looks")),
        *(Job(config=ROOMY, between_steps=what) for what in ("edits", "drops")),
        *(Job(config=ROOMY, before_step=what) for what in ("looks", "gradient looks", "gradient edits")),
        Job(config=ROOMY, before_step="looks", micro_batches=2),
        *(Job(config=ROOMY, uneven=how, micro_batches=micro) for how, micro in (("layer drop", 2), ("other order", 1))),
        Job(config=ROOMY, uneven="turns", before_step="turns"),
        Job(config={**ROOMY, "step_overlap": "speculative"}, clipped=(1, 3), steps=5),
        Job(config={**ROOMY, "precision": "fp16"}, overflows=(1,), scale=64.0, clip=None),
    )
    check_all(jobs, tmp_path)


def test_families(tmp_path: Path) -> None:
    models = ("llama", "gpt2", "t5", "gpt-checkpointed", "gpt-reentrant")
    check_all(on_device(*(Job(model=model, config=EVICTED) for model in models)), tmp_path)


def test_four_ranks(tmp_path: Path) -> None:
    jobs = on_device(
        cell("gpt", "bf16", "memory", "least", "deferred", data_ranks=4, micro_batches=2),
        cell("t5", "fp32", "group", "evicted", "none", data_ranks=4, steps=2),
    )
    check_all(jobs, tmp_path, world_size=4)
