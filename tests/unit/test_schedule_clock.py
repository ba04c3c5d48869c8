"""The planner in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepoffload.errors import BudgetError
from deepoffload.schedule.clock import StepTimes, TimedRun, TimedUse
from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Traffic, Workload
from deepoffload.schedule.events import Event, Phase
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.simulated_device import DeviceWork, TimedDevice
from deepoffload.schedule.simulated_disk import Disk
from deepoffload.schedule.steady import steady_step
from deepoffload.schedule.uses import Use, seen_until_zero_grad, unit_blocks
from tests.support.placing import plan_placement
from tests.support.played import Simulation, chain_uses

RATES = Bandwidths(100.0, 50.0, 120.0, 1e9)
SHARED = Bandwidths(100.0, 100.0, 100.0, 1e9)


def test_the_disk_does_one_thing_after_the_other_in_a_direction():
    disk = Disk(RATES)
    disk.read(1, 100, urgent=False)
    disk.read(2, 100, urgent=False)
    disk.wait_for(1)
    assert disk.now == pytest.approx(1.0)
    disk.wait_for(2)
    assert disk.now == pytest.approx(2.0) == disk.busy_s
    disk.write(3, 100)
    disk.wait_for(3)
    assert disk.now == pytest.approx(4.0)
    assert disk.collect() == [1, 2, 3] and disk.collect() == []


def test_both_directions_share_what_the_disk_has():
    disk = Disk(RATES)
    disk.read(1, 60, urgent=False)
    disk.write(2, 120)
    disk.wait_for(1)
    assert disk.now == pytest.approx(1.0)  # at half of 120
    disk.wait_for(2)
    assert disk.now == pytest.approx(1.0 + 60 / 50)  # the rest alone


def test_an_urgent_read_is_first_and_time_goes_by_without_work():
    disk = Disk(RATES)
    disk.advance(5.0)
    assert (disk.now, disk.busy_s) == (5.0, 0.0)
    disk.read(1, 100, urgent=False)
    disk.read(2, 100, urgent=True)
    disk.wait_for(2)
    assert disk.now == pytest.approx(6.0)
    disk.advance(6.5)
    assert disk.collect() == [2]
    disk.advance(10.0)
    assert disk.collect() == [1] and disk.busy_s == pytest.approx(2.0)


def test_a_device_computes_while_the_program_goes_on():
    device = TimedDevice(link_bytes_per_s=100.0, ring_bytes=150)
    assert device.launch(0.0, DeviceWork(2.0, in_bytes=100)) == 0.0  # comes until 1.0, is computed until 3.0
    assert device.launch(0.5, DeviceWork(1.0, 0, 100, 0.5)) == 0.5  # computed at 4.0, leaves until 5.0, landed at 5.5
    assert device.launched == 1 and not device.has_landed(1, 5.4)
    assert device.launch(5.4, DeviceWork(1.0, 0, 100, 0.5)) == 5.5  # the ring has no room before
    assert device.has_landed(1, 5.5) and device.wait_for(1, 6.0) == 6.0
    assert device.update(7.0, 1.0) == 8.5  # gradients that come at 7.5 have the memory first, for half a second
    assert device.wait_for(2, 0.0) == 8.0
    assert device.launch(9.0, DeviceWork(1.0, 0, 1000, 0.0)) == 9.0  # more than the ring holds waits for no one
    assert device.wait_for(3, 9.0) == 20.0


def test_one_of_several_ranks_lands_itself_and_sends_through_host_memory():
    device = TimedDevice(link_bytes_per_s=100.0, ring_bytes=150, arriving_bytes=200, program_lands=True)
    assert device.send(0.0, 100, ()) == device.send(0.0, 100, ()) == 0.0  # on the device at 1.0 and 2.0
    assert device.launch(0.0, DeviceWork(2.0, 0, 100, 0.5)) == 0.0  # computed until 4.0, gradients come at 5.0
    device.uses((1,))
    assert device.send(0.5, 100, (1,)) == 1.0  # the first has left; in the place of what is used until 4.0, so at 5.0
    assert device.launch(1.0, DeviceWork(1.0)) == 1.0  # until 6.0
    assert device.update(5.5, 1.0) == 7.0, "the program lands what has come, and then updates"
    assert device.launch(7.0, DeviceWork(1.0, 0, 100, 0.5)) == 7.0  # comes at 9.0
    assert device.land(8.0) == 8.0 and not device.has_landed(2, 9.4)
    assert device.wait_for(2, 8.0) == 9.5
    assert (device.in_bytes, device.out_bytes) == (300, 200)


def test_with_a_device_updates_in_backward_wait_for_their_gradients():
    def step(in_backward: bool) -> StepTimes:
        blocks = {1: 1, 2: 1, 3: 1}
        device = TimedDevice(1e9, 1 << 30)
        run = TimedRun(blocks, blocks, 10, RATES, lookahead_bytes=0, static=frozenset(blocks), device=device)

        def use(block: int, phase: Phase, work: DeviceWork | None, seconds: float = 0.0) -> TimedUse:
            event = Use(Event((phase, (block,)), (block,)), writes=(block,))
            update = phase is Phase.UPDATE and in_backward
            return TimedUse(event, phase, seconds, device_work=work, in_backward=update)

        back = [use(block, Phase.BACKWARD, DeviceWork(4.0, 0, 1, 0.0)) for block in (1, 2, 3)]
        update = [use(block, Phase.UPDATE, None, 3.0) for block in (1, 2, 3)]
        order = (back[0], update[0], back[1], update[1], back[2], update[2]) if in_backward else (*back, *update)
        return run.step(order)

    last, beside = step(False), step(True)
    assert last.seconds == pytest.approx(12.0 + 3 * 3.0)
    assert last.backward_s == pytest.approx(12.0)
    assert beside.seconds == pytest.approx(12.0 + 3.0)  # two of the updates while the device computes


def chain(units: int, pieces: int = 2, nbytes: int = 40) -> list[BlockSpec]:
    blocks: list[BlockSpec] = []
    for unit in range(units):
        kinds = [BlockKind.WEIGHT, BlockKind.GRADIENT, *[BlockKind.STATE] * pieces]
        for kind in kinds:
            blocks.append(BlockSpec(len(blocks), f"{unit}.{kind.value}", kind, nbytes, unit))
    return blocks


def timed(blocks: Sequence[BlockSpec], workload: Workload, seconds: float) -> list[TimedUse]:
    return [TimedUse(use, Phase.FORWARD, seconds) for use in chain_uses(blocks, workload)]


def played(
    blocks: Sequence[BlockSpec], workload: Workload, seconds: float, capacity: int, rates: Bandwidths
) -> tuple[StepTimes, TimedRun, int]:
    placement = plan_placement(
        blocks,
        capacity_bytes=capacity,
        nvme_capacity_bytes=1 << 30,
        event_weight_bytes=max(b.nbytes for b in blocks),
        bandwidths=rates,
        workload=workload,
        ring_pieces=2,
    )
    sizes = {block.id: block.nbytes for block in blocks}

    def make() -> TimedRun:
        return TimedRun(
            sizes,
            sizes,
            capacity,
            rates,
            lookahead_bytes=placement.lookahead_bytes,
            static=placement.resident,
            empty=[b.id for b in blocks if b.kind is BlockKind.GRADIENT],
        )

    discards = seen_until_zero_grad(unit_blocks(blocks), workload)
    times, run = steady_step(make, timed(blocks, workload, seconds), discards=discards)
    return times, run, len(placement.resident)


@pytest.mark.parametrize("overlap", [StepOverlap.NONE, StepOverlap.DEFERRED])
def test_with_room_for_all_a_step_is_its_computing(overlap):
    blocks = chain(5)
    workload = Workload(2, overlap)
    times, run, resident = played(blocks, workload, 0.25, 10_000, RATES)
    assert resident == len(blocks)
    assert times.seconds == pytest.approx(0.25 * len(chain_uses(blocks, workload)))
    assert (times.wait_s, times.busy_s, times.read_bytes, run.ever_written) == (0, 0, 0, set())


@settings(max_examples=40)
@given(
    st.integers(3, 8),
    st.integers(1, 3),
    st.sampled_from([StepOverlap.NONE, StepOverlap.DEFERRED]),
    st.floats(0.0, 3.0),
    st.integers(280, 900),
)
def test_no_step_beats_its_bounds_and_none_is_slower_than_one_after_the_other(units, k, overlap, seconds, capacity):
    blocks, workload = chain(units), Workload(k, overlap)
    times, _, _ = played(blocks, workload, seconds, capacity, SHARED)
    computing = seconds * len(chain_uses(blocks, workload))
    moving = SHARED.serial_seconds(Traffic(times.read_bytes, times.written_bytes))
    # A transfer may begin in one step and end in the next: over two steps, by no more than what the memory holds.
    slack = capacity / SHARED.read_bytes_per_s
    assert times.seconds >= computing - 1e-6
    assert times.seconds >= moving - slack
    assert times.seconds <= computing + moving + slack
    assert times.seconds == pytest.approx(computing + times.wait_s)


@settings(max_examples=40)
@given(st.integers(3, 8), st.floats(0.1, 2.0), st.integers(280, 900))
def test_a_faster_disk_and_a_deferred_update_never_take_longer_by_much(units, seconds, capacity):
    blocks = chain(units)
    slow, _, _ = played(blocks, Workload(1, StepOverlap.DEFERRED), seconds, capacity, SHARED)
    fast, _, _ = played(blocks, Workload(1, StepOverlap.DEFERRED), seconds, capacity, Bandwidths(1e6, 1e6, 1e6, 1e9))
    assert fast.seconds <= slow.seconds + 1e-3
    assert fast.seconds == pytest.approx(seconds * len(chain_uses(blocks, Workload(1, StepOverlap.DEFERRED))), rel=0.01)


@pytest.mark.parametrize("overlap", [StepOverlap.NONE, StepOverlap.DEFERRED])
def test_where_transfers_take_no_time_it_moves_what_the_counting_simulation_moves(overlap):
    """Two simulations of the same planner, written apart."""
    blocks, workload, capacity = chain(6), Workload(1, overlap), 320
    times, _, _ = played(blocks, workload, 1.0, capacity, Bandwidths(1e12, 1e12, 1e12, 1e9))
    sizes = {block.id: block.nbytes for block in blocks}
    gradients = [b.id for b in blocks if b.kind is BlockKind.GRADIENT]
    placement = plan_placement(
        blocks,
        capacity_bytes=capacity,
        nvme_capacity_bytes=1 << 30,
        event_weight_bytes=40,
        bandwidths=SHARED,
        workload=workload,
        ring_pieces=2,
    )
    counting = Simulation(
        sizes,
        capacity,
        lookahead_bytes=placement.lookahead_bytes,
        static=placement.resident,
        empty=gradients,
        write_behind=True,
    )
    for _ in range(3):
        before = counting.counts.read_bytes, counting.counts.written_bytes
        for use in chain_uses(blocks, workload):
            counting.use(use)
        counting.end_of_step(seen_until_zero_grad(unit_blocks(blocks), workload))
    read = counting.counts.read_bytes - before[0]
    written = counting.counts.written_bytes - before[1]
    assert times.read_bytes == pytest.approx(read, rel=0.15)
    assert times.written_bytes == pytest.approx(written, rel=0.15)


def test_what_one_event_needs_must_fit():
    blocks = chain(2)
    sizes = {block.id: block.nbytes for block in blocks}
    run = TimedRun(sizes, sizes, 60, SHARED, lookahead_bytes=60)
    with pytest.raises(BudgetError, match="60 bytes"):
        run.step(timed(blocks, Workload(), 1.0))
