"""Ranks update on guesses: the bits are those of one process that does not.

``python -m tests.ranks.speculating`` tries more.
"""

from __future__ import annotations

from pathlib import Path

from tests.ranks.speculating import guessing
from tests.ranks.training_programs import Trained, check_all, check_all_with_ranks


def _made(ranks: list[Trained]) -> list[tuple[bool, bool]]:
    """Of each rank: whether guesses were confirmed, and whether some were undone."""
    return [(one.stats["speculated"] > 0, one.stats["rolled_back"] > 0) for one in ranks]


def test_guesses_are_confirmed_or_undone_on_all_ranks(tmp_path: Path) -> None:
    jobs = [guessing("nvme"), guessing("half", "sometimes", transport="group", precision="bf16"), guessing("memory")]
    jobs.append(guessing("nvme", asked_for=False, forward_wait_s=60.0, clipped=None, clip=1e6, steps=13))
    never, sometimes, resident, late = check_all(jobs, tmp_path)
    assert _made(never) == [(True, False)] * 2
    assert _made(sometimes) == [(True, True)] * 2
    assert _made(resident) == [(False, False)] * 2, "nothing moves, so there is nothing to guess for"
    assert _made(late) == [(True, False)] * 2, "all begin when one of them waits long, where nothing is said"


def test_what_comes_between_backward_and_step_undoes_guesses(tmp_path: Path) -> None:
    names = ["evaluation", "gradient looks", "drops"]
    jobs = [guessing("nvme", before_step=name, clipped=None, clip=1e6, steps=6) for name in names]
    overflow = guessing("nvme", precision="fp16", overflows=(3,), clipped=None, clip=1e9, steps=5)
    *looking, overflowing = check_all([*jobs, overflow], tmp_path)
    for name, ranks in zip(names, looking, strict=True):
        assert any(undone for _, undone in _made(ranks)), name
    assert _made(overflowing) == [(True, True)] * 2, "one rank alone has seen it"


def test_three_ranks_that_leave_a_layer_out_or_write_weights_past_the_doors(tmp_path: Path) -> None:
    edited = guessing("nvme", before_step="edits", clipped=None, clip=1e6, data_ranks=3, steps=3)
    dropped = guessing("nvme", uneven="layer drop", data_ranks=3, steps=4)
    check_all_with_ranks([edited, dropped], tmp_path, world_size=3)
