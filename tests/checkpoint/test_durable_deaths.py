"""Runs with durable steps that are killed: none loses what it was promised, all end as if undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import durable_runs
from tests.checkpoint.training import ALL
from tests.support.programs import Programs

PLACEMENTS = ("host", "half", "optimizer", "all", "copies")
OVERLAPS = ("deferred", "none", "in_backward")
PRECISIONS = ("bf16", "keep", "fp16", "bf16+8bit", "keep+bf16")

TRAINING = [
    # placement, overlap, precision, every, paths, kills
    ("half", "deferred", "bf16", 1, 1, 2),
    ("all", "in_backward", "keep", 2, 2, 2),
]
RESUMING = [
    ("optimizer", "deferred", "bf16+8bit", 1, 2, 4),
    ("copies", "none", "keep", 1, 1, 3),
]
if ALL:  # more than 200 kills of each kind, over all placements, overlaps and precisions

    def precision_of(number: int, overlap: str) -> str:
        found = PRECISIONS[number % len(PRECISIONS)]
        return "bf16" if (found, overlap) == ("fp16", "in_backward") else found  # these two are refused

    EVERY = [(number, shift) for number in range(len(PLACEMENTS)) for shift in range(len(OVERLAPS))]
    TRAINING = [
        (PLACEMENTS[n], OVERLAPS[s], precision_of(n + s, OVERLAPS[s]), 1 + (n * s) % 3, 1 + (n + s) % 2, 14)
        for n, s in EVERY
    ]
    RESUMING = [
        (PLACEMENTS[n], OVERLAPS[s], precision_of(n + s + more, OVERLAPS[s]), 1 + s % 2, 1 + (n + more) % 2, 9)
        for n, s in EVERY
        for more in (1, 3)
    ]


def campaign(programs: Programs, tmp_path: Path, *arguments: object) -> str:
    """What ``durable_runs`` says at its end."""
    done = programs.run(Path(durable_runs.__file__), str(tmp_path), *map(str, arguments), timeout_s=1100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"killed {arguments[-1]} times: ")
    print(*arguments, last)
    return last


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", TRAINING, ids=str)
def test_kills_at_random_moments(run: tuple[str, str, str, int, int, int], programs: Programs, tmp_path: Path) -> None:
    *how, kills = run
    campaign(programs, tmp_path, *how, "any", kills)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", RESUMING, ids=str)
def test_kills_while_a_process_resumes(
    run: tuple[str, str, str, int, int, int], programs: Programs, tmp_path: Path
) -> None:
    """While it opens its files, takes the state over, and makes its first steps."""
    *how, kills = run
    assert "'resumes'" in campaign(programs, tmp_path, *how, "resuming", kills), (
        "nobody was killed while it took the state over"
    )


@pytest.mark.skipif(not ALL, reason="takes a minute: with CHECKPOINTS=all")
@pytest.mark.timeout(1200)
def test_fifty_kills_each_after_a_commit(programs: Programs, tmp_path: Path) -> None:
    campaign(programs, tmp_path, "half", "deferred", "bf16", 1, 1, "committed", 50)
