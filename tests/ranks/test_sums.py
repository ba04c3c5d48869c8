"""The norm of several ranks is that of one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SUM_UNIT, DType, norm_of
from deepoffload.params.shards import FlatTensor, shard_layout
from deepoffload.ranks.sums import PART_BYTES, SquareSum, added, mean_scale, packed, unpacked

LONGEST = (1 << 302) * SUM_UNIT


def sum_of(values: np.ndarray) -> SquareSum:
    return SquareSum(*cpu_adam.sum_of_squares(values.ctypes.data, values.size, dtype=DType.FP32, num_threads=1))


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=6), st.integers(1, 64), st.integers(0, 3))
def test_the_norm_does_not_depend_on_the_number_of_ranks(numels: list[int], world_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradients = [
        (rng.standard_normal(numel) * 10.0 ** rng.integers(-30, 15, numel)).astype(np.float32) for numel in numels
    ]
    whole = added(sum_of(gradient) for gradient in gradients if gradient.size)
    layout = shard_layout([FlatTensor(numel, 4) for numel in numels], world_size)
    sent = []
    for rank in range(world_size):
        runs = [gradients[run.tensor][run.start : run.start + run.numel] for run in layout.runs(rank)]
        sent.append(packed(added(map(sum_of, runs))))
    assert {len(part) for part in sent} == {PART_BYTES}
    assert unpacked(b"".join(sent), world_size) == whole
    assert unpacked(b"".join(reversed(sent)), world_size) == whole
    assert norm_of(whole.total) == pytest.approx(np.sqrt(sum(float((g.astype(float) ** 2).sum()) for g in gradients)))


def test_one_rank_with_a_value_that_is_not_finite_is_enough() -> None:
    parts = [SquareSum(3, False), SquareSum(0, True), SquareSum(LONGEST, False)]
    together = unpacked(memoryview(b"".join(map(packed, parts))), 3)
    assert together == SquareSum(LONGEST + 3, True)
    assert unpacked(b"".join(packed(part._replace(non_finite=False)) for part in parts), 3) == (LONGEST + 3, False)


def test_the_scale_of_a_mean() -> None:
    assert [mean_scale(n) for n in (1, 2, 8)] == [1.0, 0.5, 0.125]
    assert np.float32(mean_scale(3)) == np.float32(1) / np.float32(3)


def test_mistakes_are_told() -> None:
    part = packed(SquareSum(1, False))
    with pytest.raises(ValueError, match="95 bytes are not 1 parts of 96 bytes"):
        unpacked(part[:-1], 1)
    with pytest.raises(ValueError, match="ends with 7"):
        unpacked(part[:-8] + (7).to_bytes(8, "little"), 1)
    with pytest.raises(OverflowError):
        packed(SquareSum(-1, False))
