"""Gradients get from every rank to their owners, and are the sums in rank order, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import contributing
from tests.support.rank_processes import values_of

CASES = [
    ("same", "group", torch.bfloat16, 2, 96, 3),
    ("same", "memory", torch.float32, 2, 256, 2),
    ("same", "memory", torch.float16, 3, 96, 2),
    ("uneven", "memory", torch.bfloat16, 2, 256, 1),
    ("uneven", "group", torch.float16, 4, 96, 1),
    ("reentrant", "memory", torch.bfloat16, 2, 96, 2),
    ("reentrant", "group", torch.float32, 3, 96, 1),
]
"""Units of width 256 are landed in several chunks."""


@pytest.mark.parametrize(("program", "transport", "dtype", "world_size", "width", "micro_batches"), CASES)
def test_shards_hold_the_sum_in_rank_order(program, transport, dtype, world_size, width, micro_batches):
    said = values_of(contributing.accumulate, world_size, transport, program, dtype, width, micro_batches)
    whole = said[0]["whole"]
    assert whole
    for name, squares in whole.items():
        of_ranks = [one["squares"][name] for one in said]
        assert (sum(total for total, _ in of_ranks), any(bad for _, bad in of_ranks)) == squares, name
