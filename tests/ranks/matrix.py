"""The bits of several ranks next to one process: families, types, tiers, overlaps, transports, stages, micro-batches.

``python -m tests.ranks.matrix`` trains every cell.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
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
            stage = STAGES[(number + number // 8) % 4]  # each with every overlap, k and place
            changes = {"data_ranks": world_size, "micro_batches": micro_batches, "stage": stage}
            yield cell(family, precision, transport, place, overlap, **changes)


def vertical_cells(family: str, precision: str, world_size: int) -> Iterator[Job]:
    """The same with all micro-batches of a rank in each unit. Transports take turns, too."""
    wanted = itertools.product(("keep", "recompute"), PLACES, OVERLAPS)
    for number, (activations, place, overlap) in enumerate(wanted):
        if not (precision == "fp16" and overlap == "in_backward"):
            turn = number + number // 4  # each with every overlap
            changes = {"data_ranks": world_size, "micro_batches": 3, "stage": STAGES[turn % 4], "accumulates": True}
            job = cell(family, precision, ("memory", "group")[turn % 2], place, overlap, **changes)
            order = {"accumulation_order": "vertical", "activations": activations}
            yield replace(job, config={**job.config, **order})


ORDERS = {"calls": cells, "vertical": vertical_cells}


def name_of(job: Job) -> str:
    """For people, and to choose by."""
    config = job.config
    place = next(place for place in reversed(PLACES) if PLACES[place].items() <= config.items())
    stage = config.get("zero_optimization", {}).get("stage", "-")
    words = job.model, config["precision"], config["ranks"]["transport"], place, config["step_overlap"]
    order = f" vertical {config['activations']}" if job.accumulates else ""
    return f"{' '.join(words)} k={job.micro_batches} stage={stage}{order}"


def _batches(wanted: list[tuple[int, tuple[int, Job]]], at_once: int) -> Iterator[tuple[int, list[tuple[int, Job]]]]:
    """The trainings with their numbers, by how many ranks they have."""
    for world_size, group in itertools.groupby(wanted, key=lambda one: one[1][0]):
        same = [(number, job) for number, (_, job) in group]
        for start in range(0, len(same), at_once):
            yield world_size, same[start : start + at_once]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--types", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--orders", nargs="+", choices=tuple(ORDERS), default=list(ORDERS), help="of micro-batches")
    parser.add_argument("--shuffle", type=int, help="those of each number of ranks in another order: a seed")
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    parser.add_argument("--from", dest="first", type=int, default=0, help="begin with the training of this number")
    parser.add_argument("--count", type=int, help="so many trainings; all that are left when not said")
    parser.add_argument("--at-once", type=int, default=8, help="trainings for which processes are started")
    parser.add_argument("--device", choices=("cpu", "simgpu"), default="cpu", help="on which the models compute")
    chosen = parser.parse_args()
    sorts = itertools.product(chosen.ranks, chosen.orders, chosen.families, chosen.types)
    everything = [(ranks, job) for ranks, order, *sort in sorts for job in ORDERS[order](*sort, ranks)]
    if chosen.shuffle is not None:
        random.Random(chosen.shuffle).shuffle(everything)
        everything.sort(key=lambda one: one[0])
    wanted = [one for one in enumerate(everything) if one[0] >= chosen.first and chosen.only in name_of(one[1][1])]
    wanted, wrong = wanted[: chosen.count], 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as path:
        for world_size, some in _batches(wanted, chosen.at_once):
            begin, found = time.monotonic(), "equal"
            try:
                check_all([replace(job, device=chosen.device) for _, job in some], Path(path), world_size)
            except AssertionError as error:
                found = f"not equal ({error})"
                wrong += len(some)
            for number, job in some:
                print(f"{number:5}  {world_size} ranks, {name_of(job)}")
            print(f"{found}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(wanted) - wrong} trainings of {len(everything)}: equal")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
