"""Landing, sums of squares, split and merge, fill and copy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SUM_UNIT, DType
from tests.native.cpu_adam_scenario import SPECIAL, at_offset, guards_intact

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def random_tensor(n: int, dtype: DType, seed: int, special: bool = False) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 5, n)).astype(np.float32)
    if special:
        values = np.where(rng.random(n) < 0.2, rng.choice(SPECIAL, n), values)
    return torch.from_numpy(values).to(TORCH[dtype])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN being equal to any other."""
    integer = torch.int32 if a.dtype is torch.float32 else torch.int16
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(integer)[~nan], b.view(integer)[~nan])


def land(
    dst: torch.Tensor, src: torch.Tensor, dtypes: tuple[DType, DType], accumulate: bool, num_threads: int = 2
) -> tuple[float, bool]:
    return cpu_adam.land(
        dst.data_ptr(),
        src.data_ptr(),
        dst.numel(),
        dst_dtype=dtypes[0],
        src_dtype=dtypes[1],
        accumulate=accumulate,
        num_threads=num_threads,
    )


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("src_dtype", DType)
@pytest.mark.parametrize("dst_dtype", DType)
def test_equals_torch(dst_dtype: DType, src_dtype: DType, accumulate: bool, special: bool) -> None:
    for n in [*range(1, 71), 40_001]:
        src = random_tensor(n, src_dtype, n, special)
        dst = random_tensor(n, dst_dtype, n + 1, special)
        expected = dst.clone()
        if accumulate:
            expected.add_(src)
        else:
            expected.copy_(src)
        total, non_finite = land(dst, src, (dst_dtype, src_dtype), accumulate)
        assert same(dst, expected)
        assert non_finite == (not bool(expected.isfinite().all()))
        if not non_finite:
            assert math.isclose(total / SUM_UNIT, float(expected.double().square().sum()), rel_tol=1e-12)


@pytest.mark.parametrize("offset_bytes", [0, 4, 32])
@pytest.mark.parametrize("dtype", DType)
def test_large_blocks_are_copied_past_the_caches_with_the_same_result(dtype: DType, offset_bytes: int) -> None:
    n = (8 << 20) // 2 + 77
    values = random_tensor(n, dtype, 9, special=True)
    raw = torch.zeros(n * values.element_size() + 128, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset_bytes
    dst = raw[start : start + values.nbytes].view(values.dtype)
    result = land(dst, values, (dtype, dtype), False)
    assert torch.equal(dst.view(torch.uint8), values.view(torch.uint8))  # also the bits of the NaNs
    assert not raw[:start].any() and not raw[start + values.nbytes :].any()
    assert repr(result) == repr(cpu_adam.sum_of_squares(values.data_ptr(), n, dtype=dtype, num_threads=1))


@pytest.mark.parametrize("dtype", DType)
def test_sums_do_not_depend_on_threads_or_on_the_pass(dtype: DType) -> None:
    n = 300_007
    src = random_tensor(n, dtype, 3)
    exact = math.fsum(float(x) ** 2 for x in src.tolist())
    dst = torch.zeros_like(src)
    results = {land(dst, src, (dtype, dtype), False, threads) for threads in (1, 2, 3, 16)}
    results |= {cpu_adam.sum_of_squares(src.data_ptr(), n, dtype=dtype, num_threads=threads) for threads in (1, 2, 5)}
    assert len(results) == 1
    total, non_finite = results.pop()
    assert math.isclose(total / SUM_UNIT, exact, rel_tol=1e-14) and not non_finite


@pytest.mark.parametrize("where", [0, 15, 16, 31, 16_383, 16_384, 49_999])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DType)
def test_one_non_finite_element_anywhere_is_seen(dtype: DType, value: float, where: int) -> None:
    src, dst = torch.ones(50_000, dtype=TORCH[dtype]), torch.ones(50_000, dtype=TORCH[dtype])
    assert not cpu_adam.sum_of_squares(src.data_ptr(), 50_000, dtype=dtype, num_threads=2)[1]
    src[where] = value
    assert cpu_adam.sum_of_squares(src.data_ptr(), 50_000, dtype=dtype, num_threads=2)[1]
    assert land(dst, src, (dtype, dtype), True)[1]


def test_the_largest_finite_numbers_are_not_flagged() -> None:
    src = torch.full((100_000,), torch.finfo(torch.float32).max)
    total, non_finite = cpu_adam.sum_of_squares(src.data_ptr(), src.numel(), dtype=DType.FP32, num_threads=2)
    exact = 1e5 * torch.finfo(torch.float32).max ** 2
    assert not non_finite and math.isclose(total / SUM_UNIT, exact, rel_tol=1e-12)
    dst = src.clone()
    assert land(dst, src, (DType.FP32, DType.FP32), True)[1]  # but their sum overflows


def test_landing_onto_itself_doubles() -> None:
    values = random_tensor(10_001, DType.BF16, 7)
    expected = values + values
    land(values, values, (DType.BF16, DType.BF16), True)
    assert same(values, expected)


@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 5, 34])
def test_misaligned_buffers_and_untouched_neighbours(offset_bytes: int) -> None:
    for n in range(1, 71):
        src = at_offset(np.arange(n, dtype=np.float32), offset_bytes)
        dst = at_offset(np.ones(n, dtype=np.float32), offset_bytes)
        cpu_adam.land(
            dst.ctypes.data,
            src.ctypes.data,
            n,
            dst_dtype=DType.FP32,
            src_dtype=DType.FP32,
            accumulate=True,
            num_threads=2,
        )
        assert np.array_equal(dst, np.arange(n, dtype=np.float32) + 1)
        hi, lo = at_offset(np.zeros(n, np.uint16), offset_bytes), at_offset(np.zeros(n, np.int16), offset_bytes)
        cpu_adam.split_fp32(dst.ctypes.data, hi.ctypes.data, lo.ctypes.data, n, num_threads=1)
        cpu_adam.merge_fp32(hi.ctypes.data, lo.ctypes.data, src.ctypes.data, n, num_threads=1)
        assert np.array_equal(src, dst)
        assert all(guards_intact(view) for view in (src, dst, hi, lo))


def test_fill_and_copy() -> None:
    n = 3_000_001
    source = at_offset(np.random.default_rng(0).integers(0, 256, n, dtype=np.uint8), 1)
    target = at_offset(np.zeros(n, np.uint8), 3)
    cpu_adam.copy(target.ctypes.data, source.ctypes.data, n, 2)
    assert np.array_equal(source, target) and guards_intact(target)
    cpu_adam.fill(target.ctypes.data, n, 0xC3, 2)
    assert (target == 0xC3).all() and guards_intact(target)


@pytest.mark.parametrize("shift", [1, 64, 1_000_000])
@pytest.mark.parametrize("forwards", [True, False])
def test_overlapping_copies(shift: int, forwards: bool) -> None:
    n = 2_000_000
    array = np.random.default_rng(1).integers(0, 256, n + shift, dtype=np.uint8)
    source, target = (array[:n], array[shift:]) if forwards else (array[shift:], array[:n])
    expected = source.copy()
    cpu_adam.copy(target.ctypes.data, source.ctypes.data, n, 2)
    assert np.array_equal(target, expected)
