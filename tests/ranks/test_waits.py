"""Reports of several ranks: who was waited for, and the numbers of all; and every way to run micro-batches."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.ranks.waits import LANES, SLOW_S, accumulate_in_every_way, both_reports
from tests.support.rank_processes import values_of


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of each rank."""
    return values_of(both_reports, 2, str(tmp_path_factory.mktemp("swap")))


def test_the_report_names_the_rank_that_is_waited_for(reports: list[Any]) -> None:
    (waited, table, lanes, stats), (others, _, _, known) = (report for report, _ in reports)
    assert waited["rank 1"] > SLOW_S  # of five times that
    assert "rank 0" not in waited and "rank 1" not in others
    assert "rank 1 was waited for " in table
    assert lanes >= LANES
    assert [one["rank"] for one in stats] == [0, 1]
    assert [one["rank_1_waited_for_s"] for one in stats] == [one["rank_1_waited_for_s"] for one in known]
    assert stats[0]["rank_1_waited_for_s"] > SLOW_S


def test_no_way_to_run_micro_batches_changes_a_number() -> None:
    """``no_sync``, ``train_batch`` in both orders, stages 2 and 3."""
    first, second = values_of(accumulate_in_every_way, 2)
    assert first == second
    by_calls, *others = first
    assert all(other == by_calls for other in others)


def test_a_gradient_that_has_come_ahead_stays_until_the_parts_of_all_ranks_land(reports: list[Any]) -> None:
    """They land after its event in backward. By the order of events alone it would have left by then."""
    for _, reads in reports:
        assert len(reads) == 20 and median(reads) <= 4 * 3  # for two later micro-batches, and for the update
