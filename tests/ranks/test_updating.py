"""Ranks train: weights, gradients and norms are those of one process that has all micro-batches, bit for bit."""

from __future__ import annotations

import pytest

from tests.ranks import updating
from tests.support.rank_processes import values_of_each

CASES = [
    # transport, uneven, micro-batches, deferred, evict always, torch clips; ranks
    ("memory", False, 1, True, False, False, 2),
    ("group", False, 2, False, False, False, 2),
    ("memory", True, 1, True, True, False, 3),
    ("group", False, 1, True, False, True, 2),
    ("memory", False, 2, False, True, True, 2),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one(world_size):
    cases = [case for *case, ranks in CASES if ranks == world_size]
    assert values_of_each(updating.train, world_size, cases) == [[[]] * world_size] * len(cases)


def test_all_ranks_leave_out_a_step_that_overflows_on_one():
    found = values_of_each(updating.scale_losses, 2, [("group",), ("memory",)])
    assert found == [[([True, False, True], 4.0)] * 2] * 2
