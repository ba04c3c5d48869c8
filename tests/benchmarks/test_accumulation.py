"""The least time of a step, as benchmarks.accumulation works it out."""

from __future__ import annotations

import pytest

from benchmarks.accumulation.bound import Computing, Moves, bound_seconds
from deepoffload.schedule.cost_model import Bandwidths, Traffic

GB = 10**9
COMPUTING = Computing(forward_s=4.0, backward_s=8.0, update_s=1.0)
HALF_DUPLEX = Bandwidths(2 * GB, 2 * GB, 2 * GB, 100 * GB)


def least(update_gb: int, rest_gb: int, passing_gb: int, passes: int) -> float:
    moves = Moves(Traffic(update_gb * GB, update_gb * GB), Traffic(rest_gb * GB), passing_gb * GB)
    return bound_seconds(moves, HALF_DUPLEX, COMPUTING, passes)


def test_the_least_time_of_a_step() -> None:
    assert least(0, 0, 0, passes=1) == 13, "all is computing"
    assert least(10, 0, 0, passes=1) == 10 + 8, "the update's transfers and all forwards, then all backwards"
    assert least(10, 0, 0, passes=4) == 10 + 3 + 8, "only the first forward hides them"
    assert least(10, 0, 2, passes=1) == pytest.approx(10 - 2 + 8), "memory holds a part of them during backwards"
    assert least(10, 16, 2, passes=1) == 10 + 8, "the disk has no time for that there"
    assert least(10, 40, 0, passes=1) == 10 + 20
