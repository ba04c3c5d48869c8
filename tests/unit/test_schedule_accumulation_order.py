"""Which order of micro-batches the cost model takes, and what it says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepoffload.schedule.accumulation_order import faster_order, traffic_of, with_order
from deepoffload.schedule.cost_model import AccumulationOrder, Bandwidths, BlockKind, StepOverlap, Workload
from deepoffload.schedule.placement import BlockSpec, Placement
from tests.support.placing import plan_placement

MB = 1 << 20
DISK = Bandwidths(2e9, 2e9, 2e9, 2e10)
VERTICAL, HORIZONTAL = AccumulationOrder.VERTICAL, AccumulationOrder.HORIZONTAL


def placed(capacity: int, nbytes: int = MB, workload: Workload | None = None) -> Placement:
    """Ten units with one part of weights, one of gradients and five of state; room for so many parts."""
    kinds = {BlockKind.WEIGHT: 1, BlockKind.GRADIENT: 1, BlockKind.STATE: 5}
    blocks = [
        BlockSpec(3 * unit + n, f"{unit}.{kind.value}", kind, size * nbytes, unit)
        for unit in range(10)
        for n, (kind, size) in enumerate(kinds.items())
    ]
    return plan_placement(
        blocks,
        capacity_bytes=capacity * nbytes,
        nvme_capacity_bytes=1 << 40,
        event_weight_bytes=nbytes,
        bandwidths=DISK,
        workload=workload or Workload(4),
        ring_pieces=2,
    )


@pytest.mark.parametrize(
    ("placement", "overlap", "micro_batches", "order", "why"),
    [
        (placed(80), StepOverlap.DEFERRED, 4, HORIZONTAL, "everything stays in memory"),
        (placed(16), StepOverlap.NONE, 4, VERTICAL, "moves once per step"),
        (placed(16), StepOverlap.NONE, 1, HORIZONTAL, "less than it costs"),
        (placed(40), StepOverlap.DEFERRED, 4, VERTICAL, "state moves behind all forwards"),
        (placed(40), StepOverlap.IN_BACKWARD, 4, VERTICAL, "state moves behind all backwards"),
        (placed(40), StepOverlap.NONE, 4, HORIZONTAL, "less than it costs"),
        (placed(16, nbytes=4096), StepOverlap.DEFERRED, 4, HORIZONTAL, "less than it costs"),
    ],
)
def test_the_order_is_the_one_that_saves_time(
    placement: Placement, overlap: StepOverlap, micro_batches: int, order: AccumulationOrder, why: str
) -> None:
    found = faster_order(replace(placement, step_overlap=overlap), micro_batches)
    assert (found.order, found.is_vertical) == (order, order is VERTICAL)
    assert why in found.why


@pytest.mark.parametrize("workload", [Workload(3), Workload(3, StepOverlap.IN_BACKWARD, order=VERTICAL)])
def test_traffic_of_a_placement_is_what_its_table_counts(workload: Workload) -> None:
    placement = placed(16, workload=workload)
    assert traffic_of(placement, workload) == placement.traffic
    assert traffic_of(placement, workload, BlockKind.STATE).nbytes == 2 * 50 * MB


def test_the_table_says_which_order_and_why() -> None:
    placement = replace(placed(16), step_overlap=StepOverlap.DEFERRED)
    said = with_order(placement, AccumulationOrder.AUTO, 4).table().splitlines()[-1]
    assert "vertical: what does not stay in memory moves once per step" in said and "s of the disk" in said
    assert with_order(placement, HORIZONTAL, 4).accumulation == "horizontal, as accumulation_order says"
    assert with_order(placement, VERTICAL, 1) is placement
