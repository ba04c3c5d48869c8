"""Gradients get from every rank to their owners, and are the sums in rank order, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import contributing
from tests.support.rank_processes import values_of, values_of_each

CASES = [
    ("same", "group", torch.bfloat16, 2, 96, 3),
    ("same", "memory", torch.float32, 2, 256, 2),
    ("same", "memory", torch.float16, 3, 96, 2),
    ("uneven", "memory", torch.bfloat16, 2, 256, 1),
    ("uneven", "group", torch.float16, 4, 96, 2),
    ("reentrant", "memory", torch.bfloat16, 2, 96, 2),
    ("reentrant", "group", torch.float32, 3, 96, 1),
    ("changing", "memory", torch.bfloat16, 2, 64, 2),
]
"""Units of width 256 are landed in several chunks."""


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_hold_the_sum_in_rank_order(world_size):
    cases = [
        (transport, program, dtype, width, micro_batches)
        for program, transport, dtype, ranks, width, micro_batches in CASES
        if ranks == world_size
    ]
    for case, said in zip(cases, values_of_each(contributing.accumulate, world_size, cases), strict=True):
        whole = said[0]["whole"]
        assert whole
        for name, squares in whole.items():
            of_ranks = [one["squares"][name] for one in said]
            assert (sum(total for total, _ in of_ranks), any(bad for _, bad in of_ranks)) == squares, (case, name)


def test_more_units_than_slots_are_filled_at_once():
    """In the first step nobody knows which gradients will come: eight units are open until the end of backward."""
    for one in values_of(contributing.accumulate, 2, "memory", "same", torch.bfloat16, 64, 2, 8):
        assert one["squares"].keys() == one["whole"].keys()


def test_all_ranks_know_where_a_gradient_is_not_finite():
    said = values_of(contributing.accumulate, 2, "group", "overflowing", torch.float32, 64, 1)
    bad = [name for name, (_, non_finite) in said[0]["whole"].items() if non_finite]
    assert bad
    for name in bad:
        assert any(one["squares"][name][1] for one in said), name
