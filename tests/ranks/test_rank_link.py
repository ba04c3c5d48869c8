"""The link between ranks: sums that all ranks have alike, and what goes wrong meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepoffload.ranks.sums import SquareSum
from tests.ranks import link_programs as programs
from tests.support.rank_processes import SOON_S, run_ranks, values_of


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_have_the_same_sum(world_size: int) -> None:
    turns = 4
    results = values_of(programs.add_up, world_size, turns)
    of_ranks = sum(rank << 300 for rank in range(world_size))
    expected = [SquareSum(world_size * 10**turn + of_ranks, turn < world_size) for turn in range(turns)]
    assert results == [expected] * world_size


@pytest.mark.parametrize("what", ["SIGKILL", "fails"])
def test_a_sum_that_does_not_come_is_an_error_on_all(what: str) -> None:
    ended = run_ranks(programs.lose_a_rank_at_sums, 3, what)
    if what == "SIGKILL":
        assert ended.pop().exit_code == -9
    assert all(one.error is None for one in ended), "\n".join(one.text for one in ended)
    texts = {one.value[0] for one in ended}
    assert len(texts) == 1
    said = texts.pop()
    assert said.startswith("rank 2 has gone" if what == "SIGKILL" else "rank 2 has failed at step: ValueError"), said
    assert all(one.value[1] < SOON_S for one in ended)


def test_all_ranks_may_fail_at_once() -> None:
    assert values_of(programs.fail_together, 2, 8) == [[True] * 8] * 2


def test_a_rank_that_fails_at_several_tasks_leaves_each_error_to_the_others(tmp_path: Path) -> None:
    """It does not wait for them: they may come to the first one when it is at the fourth."""
    one, other = values_of(programs.fail_at_tasks, 2, 3, tmp_path / "failed")
    assert other == [*(f"it is number {number}" for number in range(3)), "[0, 1]"]
    assert one == [*(f"rank 1 has failed at a test: it is number {number}" for number in range(3)), "[0, 1]"]
