"""What sums of squares are: float64 within a block, exact beyond; the same however a parameter is cut."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SUM_BLOCK, SUM_UNIT, DType, norm_of

TINY = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)


def sum_of(values: np.ndarray, num_threads: int = 2) -> tuple[int, bool]:
    return cpu_adam.sum_of_squares(values.ctypes.data, values.size, dtype=DType.FP32, num_threads=num_threads)


def defined(values: np.ndarray) -> int:
    """The definition in numpy and rational numbers: a block has 32 lanes, which add the squares of every 32nd element.
    The square of an fp32 number is exact in float64."""
    total = Fraction(0)
    for start in range(0, values.size, SUM_BLOCK):
        block = np.zeros(SUM_BLOCK)
        block[: values[start : start + SUM_BLOCK].size] = values[start : start + SUM_BLOCK]
        lanes = np.zeros(32)
        for row in block.reshape(-1, 32):
            lanes += row * row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += Fraction(float(lanes[0]))
    scaled = total * SUM_UNIT
    assert scaled.denominator == 1
    return int(scaled)


def drawn(n: int, seed: int, spread: int) -> np.ndarray:
    """Numbers of 2 * spread powers of ten; with the largest spread all that fp32 has."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-spread, spread + 1, n)
    return np.clip(values, -LARGEST, LARGEST).astype(np.float32)


@pytest.mark.parametrize("spread", [0, 8, 45])
@pytest.mark.parametrize("n", [1, 31, 32, 33, SUM_BLOCK - 1, SUM_BLOCK, SUM_BLOCK + 1, 16_384, 70_001])
def test_the_definition(n: int, spread: int) -> None:
    values = drawn(n, n, spread)
    assert sum_of(values) == (defined(values), False)


@pytest.mark.parametrize("values", [[TINY], [LARGEST], [TINY, LARGEST], [0.0], [-0.0, TINY, -TINY]])
def test_the_ends_of_the_range(values: list[float]) -> None:
    array = np.array(values, np.float32)
    exact = sum(Fraction(float(x)) ** 2 for x in array)
    total, non_finite = sum_of(array)
    assert not non_finite
    if values == [TINY, LARGEST]:
        exact = Fraction(LARGEST) ** 2  # of one block: the sum is a float64
    assert Fraction(total, SUM_UNIT) == exact


@given(st.integers(1, 40_000), st.integers(0, 3), st.sampled_from([0, 8, 45]), st.data())
def test_it_does_not_matter_where_a_parameter_is_cut(n: int, seed: int, spread: int, data: st.DataObject) -> None:
    values = drawn(n, seed, spread)
    blocks = -(-n // SUM_BLOCK)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, blocks - 1)), max_size=10)))
    edges = [0, *(cut * SUM_BLOCK for cut in cuts if cut * SUM_BLOCK < n), n]
    parts = [sum_of(values[begin:end]) for begin, end in zip(edges[:-1], edges[1:], strict=True)]
    assert (sum(total for total, _ in parts), any(bad for _, bad in parts)) == sum_of(values)


def in_double_double(values: list[float]) -> float:
    high = low = 0.0
    for x in values:
        total = high + x
        rest = total - high
        low += (high - (total - rest)) + (x - rest)
        high = total
    return high + low


def test_why_pairs_of_float64_are_not_enough() -> None:
    """In 106 bits the sum of these blocks depends on where they are cut, even when it is rounded to float64."""
    firsts = [1.0, 2.0**-27, 2.0**-27, *[2.0**-54] * 5]
    squares = [first**2 for first in firsts]
    small = in_double_double(squares[3:])
    assert in_double_double(squares) == 1.0 and in_double_double([*squares[:3], small]) == 1.0 + 2.0**-52
    values = np.zeros(SUM_BLOCK * len(firsts), np.float32)
    values[::SUM_BLOCK] = firsts
    total, _ = sum_of(values)
    assert total == sum(sum_of(part)[0] for part in (values[: 3 * SUM_BLOCK], values[3 * SUM_BLOCK :]))
    assert total / SUM_UNIT == 1.0 + 2.0**-52


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_does_not_count(bad: float) -> None:
    values = np.ones(3 * SUM_BLOCK, np.float32)
    values[SUM_BLOCK + 7] = bad
    assert sum_of(values) == (2 * SUM_BLOCK * SUM_UNIT, True)


def test_a_norm_is_rounded_once_and_its_root_again() -> None:
    values = drawn(50_000, 1, 8)
    exact = Fraction(sum_of(values)[0], SUM_UNIT)
    assert norm_of(sum_of(values)[0]) == math.sqrt(exact.numerator / exact.denominator)
    assert math.isclose(norm_of(sum_of(values)[0]), float(torch.from_numpy(values).double().norm()), rel_tol=1e-14)
    assert norm_of(0) == 0.0
