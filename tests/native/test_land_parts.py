"""Parts of several ranks, added in order: the bits of one rank that adds them one by one."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SUM_BLOCK, DType
from tests.native.cpu_adam_scenario import at_offset, guards_intact
from tests.native.test_landing import TORCH, random_tensor, same

LARGE = (4 << 20) // 4 + 77
"""fp32 elements that go past the caches."""


def land_parts(
    dst: torch.Tensor, parts: list[torch.Tensor], dtype: DType, scale: float, accumulate: bool, num_threads: int = 2
) -> tuple[int, bool]:
    return cpu_adam.land_parts(
        dst.data_ptr(),
        [part.data_ptr() for part in parts],
        dst.numel(),
        dtype=dtype,
        scale=scale,
        accumulate=accumulate,
        num_threads=num_threads,
    )


def land(dst: torch.Tensor, src: torch.Tensor, dtype: DType, accumulate: bool) -> tuple[int, bool]:
    return cpu_adam.land(
        dst.data_ptr(),
        src.data_ptr(),
        dst.numel(),
        dst_dtype=DType.FP32,
        src_dtype=dtype,
        accumulate=accumulate,
        num_threads=1,
    )


def ordinary(n: int, dtype: DType, seed: int) -> torch.Tensor:
    """Gradients that stay normal numbers when they are divided by the number of ranks."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(1, 2, n) * rng.choice([-1, 1], n) * 2.0 ** rng.integers(-4, 5, n)
    return torch.from_numpy(values.astype(np.float32)).to(TORCH[dtype])


def once_rounded(exact: Fraction) -> np.float32:
    """To fp32, to nearest even."""
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1))


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", DType)
def test_ranks_have_the_bits_of_one_that_accumulates(dtype: DType, world_size: int) -> None:
    """``world_size`` ranks with three micro-batches each, and one rank with the micro-batches of all, whose losses are
    divided by ``world_size`` more: its gradients are."""
    for n in (1, 33, SUM_BLOCK + 1, 50_001):
        of_ranks, of_one = torch.full((n,), 7.0), torch.full((n,), 7.0)
        for micro_batch in range(3):
            parts = [ordinary(n, dtype, 100 * micro_batch + rank) for rank in range(world_size)]
            sums = land_parts(of_ranks, parts, dtype, 1 / world_size, accumulate=micro_batch > 0)
            for rank, part in enumerate(parts):
                expected = land(of_one, part / world_size, dtype, accumulate=micro_batch > 0 or rank > 0)
            assert torch.equal(of_ranks.view(torch.int32), of_one.view(torch.int32))
            assert sums == expected


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DType)
def test_many_at_once_are_many_one_after_the_other(dtype: DType, accumulate: bool, count: int) -> None:
    for n in (5, 70, 20_003):
        parts = [random_tensor(n, dtype, rank, special=True) for rank in range(count)]
        at_once = random_tensor(n, DType.FP32, 99)
        one_by_one = at_once.clone()
        sums = land_parts(at_once, parts, dtype, 1 / 3, accumulate)
        for rank, part in enumerate(parts):
            expected = land_parts(one_by_one, [part], dtype, 1 / 3, accumulate or rank > 0, num_threads=1)
        assert same(at_once, one_by_one)
        assert sums == expected


@pytest.mark.parametrize("dtype", DType)
def test_a_part_is_multiplied_and_added_with_one_rounding(dtype: DType) -> None:
    n = 400
    first, second, start = (ordinary(n, kind, seed) for seed, kind in enumerate((dtype, dtype, DType.FP32)))
    third = Fraction(float(np.float32(1 / 3)))
    for accumulate in (False, True):
        dst = start.clone()
        land_parts(dst, [first, second], dtype, 1 / 3, accumulate)
        for i in range(n):
            x = Fraction(float(start[i])) if accumulate else Fraction(0)
            for part in (first, second):
                x = Fraction(float(once_rounded(x + third * Fraction(float(part[i])))))
            assert float(x) == float(dst[i])


@pytest.mark.parametrize("dtype", DType)
def test_a_scale_of_one_changes_nothing(dtype: DType) -> None:
    src = random_tensor(3000, dtype, 1, special=True)
    for accumulate in (False, True):
        one, other = random_tensor(3000, DType.FP32, 2), random_tensor(3000, DType.FP32, 2)
        assert land_parts(one, [src], dtype, 1.0, accumulate) == land(other, src, dtype, accumulate)
        assert same(one, other)


@pytest.mark.parametrize("offset_bytes", [0, 4, 32])
@pytest.mark.parametrize("dtype", DType)
def test_large_shards_go_past_the_caches_with_the_same_result(dtype: DType, offset_bytes: int) -> None:
    parts = [random_tensor(LARGE, dtype, rank, special=True) for rank in range(3)]
    raw = torch.zeros(LARGE * 4 + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset_bytes
    dst = raw[start : start + LARGE * 4].view(torch.float32)
    sums = land_parts(dst, parts, dtype, 0.25, accumulate=False)
    expected = torch.zeros(LARGE)  # -0 + 0 is 0, but that equals -0 below
    assert sums == land_parts(expected, parts, dtype, 0.25, accumulate=True, num_threads=1)
    finite = expected.isfinite()
    assert torch.equal(finite, dst.isfinite()) and torch.equal(dst[finite], expected[finite])
    assert not raw[:start].any() and not raw[start + LARGE * 4 :].any()


@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 5, 34])
def test_misaligned_parts_and_untouched_neighbours(offset_bytes: int) -> None:
    for n in range(1, 71):
        parts = [at_offset(np.arange(n, dtype=np.float32) + rank, offset_bytes) for rank in range(3)]
        dst = at_offset(np.ones(n, dtype=np.float32), offset_bytes)
        addresses = [part.ctypes.data for part in parts]
        settings = {"dtype": DType.FP32, "scale": 0.5, "accumulate": True, "num_threads": 2}
        cpu_adam.land_parts(dst.ctypes.data, addresses, n, **settings)  # type: ignore[arg-type]
        assert np.array_equal(dst, 1 + 1.5 * np.arange(n) + 1.5)
        assert all(guards_intact(view) for view in (dst, *parts))


def test_an_overflow_of_one_rank_is_seen() -> None:
    parts = [torch.ones(5000, dtype=torch.float16) for _ in range(4)]
    dst = torch.zeros(5000)
    assert not land_parts(dst, parts, DType.FP16, 0.25, accumulate=False)[1]
    parts[2][4321] = torch.inf
    assert land_parts(dst, parts, DType.FP16, 0.25, accumulate=False)[1]


def test_arguments() -> None:
    array = np.zeros(16, np.float32)
    a = array.ctypes.data
    good = {"dst": a, "parts": [a], "numel": 4, "dtype": DType.FP32, "scale": 0.5, "accumulate": True, "num_threads": 1}
    for field, value, message in [
        ("dst", 0, "dst"),
        ("parts", [], "parts is empty"),
        ("parts", [a, 0], r"parts\[1\] is 0"),
        ("parts", [a, "b"], r"parts\[1\]"),
        ("numel", 0, "numel"),
        ("dtype", 3, "dtype"),
        ("scale", 0.0, "scale"),
        ("scale", -1.0, "scale"),
        ("scale", float("nan"), "scale"),
        ("scale", 1e300, "scale"),
        ("num_threads", 0, "num_threads"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu_adam.land_parts(**{**good, field: value})  # type: ignore[arg-type]
    assert not array.any()
