"""When a rank nudges the others, and whom it has waited for."""

from __future__ import annotations

import pytest

from deepoffload.ranks.long_waits import NOTICE_AFTER_S, LongWait
from deepoffload.ranks.wait_times import NUDGE_AFTER_S, NUDGE_AFTER_S_MAX, Patience, WaitTimes


def test_nobody_is_nudged_before_twice_the_longest_usual_wait():
    times = WaitTimes(2)
    assert times.nudge_after_s == NUDGE_AFTER_S
    for _ in range(5):  # steps, each with one long wait among many short ones
        times.ended(0.5)
        for _ in range(200):
            times.ended(0.002)
        assert times.nudge_after_s > 0.5
    times.ended(60.0)
    assert times.nudge_after_s == NUDGE_AFTER_S_MAX
    for _ in range(2000):
        times.ended(0.002)
    assert times.nudge_after_s == NUDGE_AFTER_S  # a long wait is forgotten


def test_calls_that_do_not_wait_are_no_waits():
    times = WaitTimes(2)
    times.ended(0.5)
    usual_s = times.usual_s
    times.ended(0.0001)
    assert times.usual_s == usual_s


def test_who_waits_least_is_waited_for():
    times = WaitTimes(3)
    times.round_over(0, [500_000, 100_000, 700_000])
    times.round_over(0, [500_000, 300_000, 900_000])  # this one waits least
    times.round_over(0, [1_500_000, 1_300_000, 900_000])
    assert times.for_rank_s == pytest.approx([0.0, 0.4, 1.0])


def test_each_nudge_comes_after_twice_as_long():
    patience = Patience(0.1, now=5.0)
    due = []
    for _ in range(4):
        due.append(patience.nudge_at)
        patience.nudged(patience.nudge_at)
    assert due == pytest.approx([5.1, 5.3, 5.7, 6.5])


def test_a_long_wait_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The others are asked where they are before it."""
    asked: list[float] = []
    wait = LongWait(100.0)
    for seconds in range(200):
        wait.look(100.0 + seconds, lambda: asked.append(seconds), lambda: "rank 0 waits at step for rank 1", 600.0)  # noqa: B023
    assert asked == [NOTICE_AFTER_S]
    (said,) = caplog.messages
    assert said.startswith("rank 0 waits at step for rank 1, for 32 s so far (only a notice: who computes is waited")
