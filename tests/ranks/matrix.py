"""The bits of several ranks next to one process: families, types, tiers, overlaps, transports, stages, micro-batches.

``python -m tests.ranks.matrix`` trains every cell. Ranks of which one third or one fifth is no fp32 number have no
process to be compared with: see ``tests.ranks.speculating``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks.training_programs import LEAST, Job, check_all

FAMILIES = ("gpt", "llama", "gpt2", "mixtral", "t5", "gpt-checkpointed", "gpt-reentrant")
PLACES: dict[str, dict[str, Any]] = {
    "memory": {"host_budget": "96MiB"},
    "least": {"host_budget": LEAST, "nvme_budget": "192MiB"},
    "evicted": {
        "host_budget": "96MiB",
        "nvme_budget": "192MiB",
        "debug": {"evict_always": True, "poison": True},
    },
}
OVERLAPS = ("deferred", "none", "in_backward", "speculative")
STAGES = (None, 1, 2, 3)


def cell(family: str, precision: str, transport: str, place: str, overlap: str, **changes: Any) -> Job:
    """One training. ``changes``: fields of the job, and ``stage``."""
    stage = changes.pop("stage", None)
    config = {**PLACES[place], "precision": precision, "step_overlap": overlap, "ranks": {"transport": transport}}
    if stage is not None:
        config["zero_optimization"] = {"stage": stage}
    scale = 1024.0 if precision == "fp16" else 1.0
    clip = None if overlap == "in_backward" or precision == "fp16" else 1.0
    return Job(
        **{"model": family, "clip": clip, "scale": scale, "steps": 3, "state": True, "config": config, **changes}
    )


def cells(family: str, precision: str, world_size: int) -> Iterator[Job]:
    """All of a family in one type. Stages take turns: they lead to the same code."""
    wanted = itertools.product(("memory", "group"), PLACES, OVERLAPS, (1, 3))
    for number, (transport, place, overlap, micro_batches) in enumerate(wanted):
        if not (precision == "fp16" and overlap == "in_backward"):  # refused: gradients may overflow
            changes = {"data_ranks": world_size, "micro_batches": micro_batches, "stage": STAGES[number % 4]}
            yield cell(family, precision, transport, place, overlap, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    chosen = parser.parse_args()
    number = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as path:
        for world_size, family, precision in itertools.product(chosen.ranks, chosen.families, ("fp32", "bf16", "fp16")):
            begin, jobs = time.monotonic(), list(cells(family, precision, world_size))
            check_all(jobs, Path(path), world_size)
            number += len(jobs)
            print(f"{world_size} ranks, {family}, {precision}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{number} trainings: equal")


if __name__ == "__main__":
    main()
