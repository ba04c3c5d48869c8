"""``safe_get_*`` and ``safe_set_*`` with two real ranks: the values of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.deepspeed import fp32_ranks
from tests.support.rank_processes import values_of


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_full_values_are_those_of_one_process(precision):
    (alone,) = values_of(fp32_ranks.get_and_set, 1, precision)
    first, second = values_of(fp32_ranks.get_and_set, 2, precision)
    assert first == alone
    assert second == [None, *alone[1:]]


@pytest.mark.parametrize("precision", ["bf16"])
def test_local_parts_are_the_shards_and_are_set_by_their_owners(precision):
    ((parts, full),) = values_of(fp32_ranks.local_parts, 1, precision)
    ranks = values_of(fp32_ranks.local_parts, 2, precision)
    for number, values in enumerate(parts):
        for kind, whole in enumerate(values):
            shards = [found[0][number][kind] for found in ranks]
            assert np.array_equal(np.concatenate(shards), whole.ravel()), (number, kind)
            for found in ranks:
                assert np.array_equal(found[1][number][kind], full[number][kind]), (number, kind)
    assert any(values[0].size for values in ranks[1][0]), "nothing is rank 1's"
