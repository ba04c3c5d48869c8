"""Which order of micro-batches saves time: what moves in each of them, and what hides behind computing."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from deepoffload.schedule.cost_model import (
    AccumulationOrder,
    BlockKind,
    StepOverlap,
    Traffic,
    Workload,
    block_traffic,
)
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.table import human_bytes

SWITCH_S = 100e-6
"""So much time a switch between micro-batches costs, with all else that the order costs: 319 M parameters in memory
take 28 ms more, and there are 208 switches (benchmarks/results/accumulation_319m.json)."""


class OrderChoice(NamedTuple):
    """An order, why in words for people, and the figures behind that."""

    order: AccumulationOrder
    why: str
    figures: str

    @property
    def is_vertical(self) -> bool:
        return self.order is AccumulationOrder.VERTICAL


def faster_order(placement: Placement, micro_batches: int, *, on_device: bool = False) -> OrderChoice:
    """The order in which a step of so many micro-batches takes less time.

    Vertical order moves weights and gradients once per step. Optimizer state moves once in either order, but an update
    has all forwards to hide behind (with ``IN_BACKWARD`` all backwards), and not only those of one micro-batch. What
    it costs is that micro-batches switch at each unit.

    ``on_device``: tensors show copies on a device. How long these take is not known here, and they are not counted.
    """
    overlap, rates = placement.step_overlap, placement.bandwidths
    switch_s = 2 * micro_batches * len({block.unit for block in placement.blocks}) * SWITCH_S
    one_by_one, together = (
        traffic_of(placement, Workload(micro_batches, overlap, order=order))
        for order in (AccumulationOrder.HORIZONTAL, AccumulationOrder.VERTICAL)
    )
    saved_bytes = one_by_one.nbytes - together.nbytes
    saved_s = rates.seconds(one_by_one) - rates.seconds(together)
    state_s = rates.seconds(traffic_of(placement, Workload(micro_batches, overlap), BlockKind.STATE))
    switches = f"switches between micro-batches take {switch_s * 1e3:.3g} ms"
    if not placement.paged:
        where = "host memory, and copies to the device are not counted" if on_device else "memory"
        return OrderChoice(AccumulationOrder.HORIZONTAL, f"everything stays in {where}", "")
    if micro_batches > 1 and saved_s > switch_s:
        figures = f"{human_bytes(saved_bytes)} less per step, {saved_s:.3g} s of the disk; {switches}"
        return OrderChoice(AccumulationOrder.VERTICAL, "what does not stay in memory moves once per step", figures)
    if micro_batches > 1 and overlap is not StepOverlap.NONE and state_s > switch_s:
        behind = "backwards" if overlap is StepOverlap.IN_BACKWARD else "forwards"
        figures = f"{state_s:.3g} s of the disk; {switches}"
        return OrderChoice(AccumulationOrder.VERTICAL, f"optimizer state moves behind all {behind}", figures)
    spared_s = saved_s if overlap is StepOverlap.NONE else max(saved_s, state_s)
    figures = f"{spared_s * 1e3:.3g} ms of the disk; {switches}"
    return OrderChoice(AccumulationOrder.HORIZONTAL, "the vertical order would save less than it costs", figures)


def with_order(
    placement: Placement, said: AccumulationOrder, micro_batches: int, *, on_device: bool = False
) -> Placement:
    """The placement that says in which order micro-batches are run, and why.

    Args:
        said: what the configuration says.
        on_device: as of :func:`faster_order`.
    """
    if micro_batches == 1:
        return placement
    if said is not AccumulationOrder.AUTO:
        return replace(placement, accumulation=f"{said.value}, as accumulation_order says")
    order, why, figures = faster_order(placement, micro_batches, on_device=on_device)
    text = f"where deepoffload.accumulate or train_batch runs the micro-batches, {order.value}: {why}"
    return replace(placement, accumulation=f"{text} ({figures})" if figures else text)


def traffic_of(placement: Placement, workload: Workload, kind: BlockKind | None = None) -> Traffic:
    """What a step moves with this placement. ``kind``: only for blocks of that kind."""
    trained = {block.unit for block in placement.blocks if block.kind is not BlockKind.WEIGHT}
    total = Traffic()
    for block in placement.blocks:
        if block.id in placement.paged and kind in (None, block.kind):
            nbytes = round(block.nbytes * block.read_share)
            total += block_traffic(block.kind, nbytes, workload, updated=block.unit in trained)
    return total
