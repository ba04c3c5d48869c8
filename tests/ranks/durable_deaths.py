"""Ranks with durable steps are killed at random places, again and again, until they have trained to their end. Each
time all resume from one step, and in the end the bits are those of a run in which nobody died.

``python -m tests.ranks.durable_deaths --runs 10 --path DIR`` tries so many runs, each with other deaths.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.ranks.durable_programs import PLACES, Death, Told, train
from tests.support.rank_processes import run_ranks, values_of

STEPS = 12
DEATHS = 5
SETTINGS: list[dict[str, Any]] = [
    {"host_budget": "1400KiB", "nvme_budget": "64MiB", "precision": "bf16"},
    {"host_budget": "1400KiB", "nvme_budget": "64MiB", "step_overlap": "none", "ranks": {"transport": "group"}},
    {"host_budget": "32MiB", "precision": "fp16"},
    {"host_budget": "32MiB", "ranks": {"transport": "group"}},
]


def live(config: dict[str, Any], world_size: int, expected: list[Told], dice: random.Random) -> str:
    """One run with its deaths. Returns what was wrong, "" where nothing was."""
    stood = 0
    for number in range(DEATHS + 1):
        times = dice.randint(1, 4)
        death = Death(dice.randrange(world_size), dice.choice(PLACES), times) if number < DEATHS else None
        ended = run_ranks(train, world_size, config, STEPS, death, rank_0_has_store=True)  # and may die with it
        for rank, one in enumerate(ended):
            if one.exit_code == -signal.SIGKILL:
                continue
            if one.error is not None:
                return f"{death}: rank {rank} ended with {one.text}"
            told: Told = one.value
            if told.first is not None and told.first < stood:
                return f"{death}: rank {rank} resumed after step {told.first}, and all had committed {stood + 1}"
            if told.losses != {step: expected[rank].losses[step] for step in told.losses}:
                return f"{death}: rank {rank} has other losses"
        seen = [one.value for one in ended if one.value is not None and one.value.first is not None]
        stood = max([stood, *(told.first + len(told.losses) - 2 for told in seen)])
    if [one.value.end for one in ended] != [told.end for told in expected]:
        return "other weights, state or random numbers at the end"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", help="where swap files are; on a disk")
    said = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=said.path))
    wrong = 0
    try:
        for number in range(said.seed, said.seed + said.runs):
            dice = random.Random(number)
            settings, world_size = dice.choice(SETTINGS), dice.choice((2, 2, 3))
            paths = [folder / f"{number}-{name}" for name in ("undisturbed", "killed")]
            for path in paths:
                path.mkdir()
            plain, killed = ({**settings, "durability": {"every": 1, "path": str(path)}} for path in paths)
            fault = live(killed, world_size, values_of(train, world_size, plain, STEPS), dice)
            wrong += bool(fault)
            print(f"run {number}, {world_size} ranks, {settings}: {fault or 'as undisturbed'}", flush=True)
            for path in paths:
                shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{wrong} of {said.runs} runs were wrong")
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
