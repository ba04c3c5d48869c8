"""Reports of several ranks: who was waited for, and the numbers of all; and micro-batches inside ``no_sync``."""

from __future__ import annotations

from tests.ranks.waits import LANES, SLOW_S, accumulate_both_ways, train_with_a_slow_rank
from tests.support.rank_processes import values_of


def test_the_report_names_the_rank_that_is_waited_for() -> None:
    (waited, table, lanes, stats), (others, _, _, known) = values_of(train_with_a_slow_rank, 2)
    assert waited["rank 1"] > SLOW_S  # of five times that
    assert "rank 0" not in waited and "rank 1" not in others
    assert "rank 1 was waited for " in table
    assert lanes >= LANES
    assert [one["rank"] for one in stats] == [0, 1]
    assert [one["rank_1_waited_for_s"] for one in stats] == [one["rank_1_waited_for_s"] for one in known]
    assert stats[0]["rank_1_waited_for_s"] > SLOW_S


def test_no_sync_changes_no_number() -> None:
    first, second = values_of(accumulate_both_ways, 2)
    assert first == second
    assert first[0] == first[1]
