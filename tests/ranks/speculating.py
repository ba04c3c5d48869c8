"""Ranks that update on guesses, next to one process that does not: the bits, and how many guesses were made.

``python -m tests.ranks.speculating`` tries every combination of type, number of ranks, transport, placement and
clipping, and everything that may come between backward and step. Three ranks are compared with three that do not guess:
one third is no fp32 number, so one process has other bits.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.ranks.training_programs import Job, check_all, check_all_with_ranks

CLIPPED: dict[str, tuple[int, ...]] = {"never": (), "always": tuple(range(8)), "sometimes": (3, 5)}
STEPS = 7
"""In the first there is no state, in the second the units are chosen."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {"host_budget": "2200KiB", "nvme_budget": "64MiB"},
    "half": {"host_budget": "3400KiB", "nvme_budget": "64MiB"},
    "evicted": {"host_budget": "12MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True, "poison": True}},
    "memory": {"host_budget": "64MiB"},
}
"""By where most is, with 2 ranks."""
BEFORE_STEP = ("evaluation", "looks", "edits", "gradient looks", "gradient edits", "drops")


def guessing(
    placement: str,
    clips: str = "never",
    *,
    transport: str = "memory",
    precision: str = "fp32",
    asked_for: bool = True,
    **changes: Any,
) -> Job:
    """A training with guesses. ``changes``: fields of the job."""
    config = {**PLACEMENTS[placement], "precision": precision, "ranks": {"transport": transport}}
    config["step_overlap"] = "speculative" if asked_for else None
    scale = 1024.0 if precision == "fp16" else 1.0
    return Job(**{"steps": STEPS, "clipped": CLIPPED[clips], "config": config, "scale": scale, **changes})


def batches_of_jobs(world_size: int) -> Iterator[tuple[str, list[Job]]]:
    """All that is tried, with the name of each batch."""
    for precision, transport, placement in itertools.product(("fp32", "bf16", "fp16"), ("memory", "group"), PLACEMENTS):
        changes: dict[str, Any] = {"transport": transport, "precision": precision, "data_ranks": world_size}
        wanted = itertools.product(CLIPPED, (1, 2))
        yield (
            f"{precision} {transport} {placement}",
            [guessing(placement, clips, micro_batches=k, **changes) for clips, k in wanted],
        )
    for placement, model in itertools.product(("nvme", "evicted"), ("gpt", "gpt-checkpointed")):
        changes = {"clipped": None, "clip": 1e6, "data_ranks": world_size, "model": model}
        jobs = [guessing(placement, before_step=name, **changes) for name in BEFORE_STEP]
        yield f"before the step {placement} {model}", jobs
    for model in ("llama", "gpt2", "mixtral", "t5", "gpt-reentrant"):
        job = guessing("evicted", "sometimes", model=model, data_ranks=world_size)
        yield model, [replace(job, config={**job.config, "host_budget": "64MiB"})]
    for precision in ("fp16", "bf16"):
        changes = {"precision": precision, "clipped": None, "clip": 1e9, "data_ranks": world_size}
        yield f"overflow {precision}", [guessing("nvme", overflows=(3, 5), **changes)]
    yield "layer drop", [guessing("nvme", uneven="layer drop", data_ranks=world_size)]
    yield "turns", [guessing("nvme", uneven="turns", before_step="turns", data_ranks=world_size, steps=5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", default="", help="batches whose name has this in it")
    chosen = parser.parse_args()
    number = 0
    with tempfile.TemporaryDirectory() as path:
        for world_size in chosen.ranks:
            check = check_all if world_size == 2 else check_all_with_ranks
            for name, jobs in batches_of_jobs(world_size):
                if chosen.only not in name:
                    continue
                begin = time.monotonic()
                stats = [ranks[0].stats for ranks in check(jobs, Path(path), world_size)]
                number += len(jobs)
                told = ("speculated", "rolled_back", "speculation_left")
                made = {key: [int(one[key]) for one in stats] for key in told}
                print(f"{world_size} ranks, {name:36} {time.monotonic() - begin:5.1f} s  {made}", flush=True)
    print(f"{number} trainings: equal")


if __name__ == "__main__":
    main()
