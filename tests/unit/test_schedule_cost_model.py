"""The cost model gives the bytes of the design and times that follow from the rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.schedule.cost_model import (
    AccumulationOrder,
    Bandwidths,
    BlockKind,
    StepOverlap,
    Traffic,
    Workload,
    block_traffic,
    seconds_saved,
    update_seconds,
)

SHARED = Bandwidths(2e9, 2.5e9, 2.25e9, 5e10)
DUPLEX = Bandwidths(2e9, 2e9, 4e9, 5e10)

rates = st.floats(1e8, 1e10)
nbytes = st.integers(0, 1 << 40)


@st.composite
def disks(draw: st.DrawFn) -> Bandwidths:
    """Any disk for which doing two things at once is not slower than the slower of them, nor faster than their sum."""
    read, write = draw(rates), draw(rates)
    return Bandwidths(read, write, draw(st.floats(min(read, write), read + write)), 5e10)


def bytes_per_parameter(workload: Workload) -> tuple[float, float]:
    """bf16 weights and gradients, split state of 10 bytes per parameter, nothing resident."""
    kinds = ((BlockKind.WEIGHT, 2), (BlockKind.GRADIENT, 2), (BlockKind.STATE, 10))
    parts = [block_traffic(kind, size * 1000, workload) for kind, size in kinds]
    return sum(part.read_bytes for part in parts) / 1000, sum(part.written_bytes for part in parts) / 1000


@pytest.mark.parametrize(
    ("overlap", "k", "read", "written"),
    [
        (StepOverlap.NONE, 1, 6 + 2 + 10, 2 + 2 + 10),
        (StepOverlap.DEFERRED, 1, 4 + 2 + 10, 2 + 2 + 10),  # 26 without spilled gradients
        (StepOverlap.IN_BACKWARD, 1, 4 + 0 + 10, 2 + 0 + 10),
        (StepOverlap.NONE, 4, 18 + 8 + 10, 2 + 8 + 10),
        (StepOverlap.DEFERRED, 4, 16 + 8 + 10, 2 + 8 + 10),
        (StepOverlap.IN_BACKWARD, 4, 16 + 6 + 10, 2 + 6 + 10),
    ],
)
def test_bytes_of_a_step(overlap: StepOverlap, k: int, read: int, written: int) -> None:
    assert bytes_per_parameter(Workload(k, overlap)) == (read, written)


@pytest.mark.parametrize("overlap", StepOverlap)
def test_in_vertical_order_a_step_moves_the_bytes_of_one_micro_batch(overlap: StepOverlap) -> None:
    vertical = Workload(8, overlap, order=AccumulationOrder.VERTICAL)
    assert bytes_per_parameter(vertical) == bytes_per_parameter(Workload(1, overlap))
    assert (vertical.passes, vertical.together, Workload(8).passes) == (1, 8, 8)
    with pytest.raises(ValueError, match="must be decided"):
        Workload(8, overlap, order=AccumulationOrder.AUTO)


def test_without_training_weights_are_read_once_and_nothing_else_moves() -> None:
    assert bytes_per_parameter(Workload(training=False)) == (2, 0)


def test_frozen_weights_are_only_read() -> None:
    workload = Workload(3, StepOverlap.NONE)
    assert block_traffic(BlockKind.WEIGHT, 10, workload, updated=False) == Traffic(60, 0)


def test_equal_traffic_on_a_shared_and_on_a_duplex_disk() -> None:
    traffic = Traffic(10**9, 10**9)
    assert SHARED.serial_seconds(traffic) == pytest.approx(0.9)
    assert SHARED.seconds(traffic) == pytest.approx(2 / 2.25)
    assert DUPLEX.seconds(traffic) == pytest.approx(0.5)


def test_on_a_duplex_disk_the_direction_that_finishes_first_is_free() -> None:
    assert DUPLEX.prices(Traffic(3, 2)) == pytest.approx((0.5e-9, 0.0))
    assert DUPLEX.prices(Traffic(2, 3)) == pytest.approx((0.0, 0.5e-9))
    assert DUPLEX.prices(Traffic(2, 2)) == pytest.approx((0.25e-9, 0.25e-9))


@given(disks(), nbytes, nbytes)
def test_seconds_lie_between_full_overlap_and_none(disk: Bandwidths, read: int, written: int) -> None:
    traffic = Traffic(read, written)
    best = max(read / disk.read_bytes_per_s, written / disk.write_bytes_per_s)
    fastest = (read + written) / (disk.read_bytes_per_s + disk.write_bytes_per_s)
    assert min(best, fastest) * (1 - 1e-9) <= disk.seconds(traffic) <= disk.serial_seconds(traffic) * (1 + 1e-9)


@given(disks(), st.integers(10**9, 10**12), st.integers(10**9, 10**12), st.integers(0, 1000), st.integers(0, 1000))
def test_prices_are_the_slope_of_seconds(disk: Bandwidths, read: int, written: int, less_r: int, less_w: int) -> None:
    if abs(read - written) <= 1000:
        written = read + 2000
    saved = disk.seconds(Traffic(read, written)) - disk.seconds(Traffic(read - less_r, written - less_w))
    prices = disk.prices(Traffic(read, written))
    if prices[0] > 0 and prices[1] > 0:
        assert seconds_saved(Traffic(less_r, less_w), prices) == pytest.approx(saved, rel=1e-3, abs=1e-10)


@given(disks(), nbytes, nbytes)
def test_prices_are_never_negative(disk: Bandwidths, read: int, written: int) -> None:
    assert min(disk.prices(Traffic(read, written))) >= 0


def test_an_update_is_bound_by_memory() -> None:
    assert update_seconds(5 * 10**10, DUPLEX) == pytest.approx(1.0)
