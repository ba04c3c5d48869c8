"""Trace, planner, cost model and placement together: programs played on a simulated memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.errors import BudgetError
from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Workload
from deepoffload.schedule.events import Event, Phase
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.uses import Use, seen_until_zero_grad, step_uses, unit_blocks
from tests.support.placing import plan_placement
from tests.support.played import ChainVisit, Simulation, chain_uses

DISK = Bandwidths(2.1e9, 2.5e9, 2.7e9, 5e10)


def joint_bytes(order: Sequence[Event], sizes: dict[int, int]) -> int:
    """The most that an event and the one after it, going round, need together."""
    following = [*order[1:], *order[:1]]
    pairs = [set(one.blocks) | set(other.blocks) for one, other in zip(order, following, strict=True)]
    return max(sum(sizes[block] for block in pair) for pair in pairs)


def event_bytes(order: Sequence[Event], sizes: dict[int, int]) -> int:
    return max(sum(sizes[block] for block in set(event.blocks)) for event in order)


@st.composite
def programs(draw: st.DrawFn, equal_sizes: bool = False) -> tuple[list[Event], dict[int, int]]:
    """A cyclic order of events, each named by its place in it, over blocks of any size."""
    num_blocks = draw(st.integers(2, 12))
    sizes = {block: 1 if equal_sizes else draw(st.integers(1, 9)) for block in range(num_blocks)}
    uses = st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=3, unique=True)
    order = [Event(key, tuple(blocks)) for key, blocks in enumerate(draw(st.lists(uses, min_size=1, max_size=20)))]
    return order, sizes


def play(simulation: Simulation, order: Sequence[Event]) -> int:
    """Faults of one step."""
    faults = sum(simulation.use(Use(event, writes=event.blocks[:1])) for event in order)
    simulation.end_of_step()
    return faults


@given(programs(), st.integers(0, 40), st.integers(0, 40))
def test_a_steady_order_has_no_faults_after_the_first_step(
    program: tuple[list[Event], dict[int, int]], spare_bytes: int, spare_lookahead_bytes: int
) -> None:
    order, sizes = program
    capacity = joint_bytes(order, sizes) + spare_bytes
    simulation = Simulation(sizes, capacity, lookahead_bytes=event_bytes(order, sizes) + spare_lookahead_bytes)
    play(simulation, order)
    assert [play(simulation, order) for _ in range(3)] == [0, 0, 0]


@st.composite
def disturbances(draw: st.DrawFn, order: list[Event]) -> list[Event]:
    """The order with pieces skipped, repeated, or interrupted by something else."""
    disturbed: list[Event] = []
    for event in order:
        what = draw(st.sampled_from(["as is", "as is", "as is", "skip", "repeat", "interlude"]))
        if what == "interlude":
            begin = draw(st.integers(0, len(order) - 1))
            disturbed += order[begin : draw(st.integers(begin, len(order)))]
        disturbed += [event] * {"skip": 0, "repeat": 2}.get(what, 1)
    return disturbed


@given(st.data(), programs())
def test_whatever_the_program_does_memory_is_kept_and_it_heals(
    data: st.DataObject, program: tuple[list[Event], dict[int, int]]
) -> None:
    order, sizes = program
    capacity = joint_bytes(order, sizes) + data.draw(st.integers(0, 20))
    lookahead = data.draw(st.integers(event_bytes(order, sizes), 60))
    simulation = Simulation(sizes, capacity, lookahead_bytes=lookahead, write_behind=data.draw(st.booleans()))
    for _ in range(3):
        disturbed = data.draw(disturbances(order))
        for event in disturbed:
            simulation.use(Use(event, writes=event.blocks[:1]))
            held = sum(sizes[block] for block in simulation.resident)
            assert set(event.blocks) <= simulation.resident
            assert held <= capacity
        if data.draw(st.booleans()):
            simulation.end_of_step()
    assert simulation.counts.peak_bytes <= capacity
    for _ in range(3):
        play(simulation, order)
    assert play(simulation, order) == 0


class LruMemory:
    """Demand fetching with least-recently-used eviction, for blocks of size 1."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[int, None] = OrderedDict()
        self.fetched = 0

    def use(self, event: Event) -> None:
        for block in event.blocks:
            if block in self._resident:
                self._resident.move_to_end(block)
        for block in event.blocks:
            if block not in self._resident:
                self.fetched += 1
                if len(self._resident) == self._capacity:
                    victim = next(held for held in self._resident if held not in event.blocks)
                    del self._resident[victim]
                self._resident[block] = None


@given(programs(equal_sizes=True), st.integers(0, 8))
def test_fetches_no_more_than_lru(program: tuple[list[Event], dict[int, int]], spare: int) -> None:
    """On demand and with a known order Belady's choice is optimal for blocks of one size; the two memories hold
    different blocks when the comparison begins, so there is ``capacity``."""
    order, sizes = program
    capacity = event_bytes(order, sizes) + spare
    ours, lru = Simulation(sizes, capacity, lookahead_bytes=0), LruMemory(capacity)
    play(ours, order)
    before = ours.counts.read_bytes
    for _ in range(6):
        play(ours, order)
        for event in order:
            lru.use(event)
    assert ours.counts.read_bytes - before <= lru.fetched + capacity


@given(programs(equal_sizes=True), st.integers(0, 8), st.integers(0, 20))
def test_fewer_faults_than_lru(program: tuple[list[Event], dict[int, int]], spare: int, lookahead: int) -> None:
    order, sizes = program
    capacity = event_bytes(order, sizes) + spare
    ours, lru = Simulation(sizes, capacity, lookahead_bytes=lookahead), LruMemory(capacity)
    for _ in range(2):
        play(ours, order)
        for event in order:
            lru.use(event)
    lru.fetched = 0
    faults = 0
    for _ in range(4):
        faults += play(ours, order)
        for event in order:
            lru.use(event)
    assert faults <= lru.fetched + capacity


def test_a_cyclic_order_longer_than_memory_hits_where_lru_never_does() -> None:
    order = [Event(block, (block,)) for block in range(10)]
    ours, lru = Simulation(dict.fromkeys(range(10), 1), 6, lookahead_bytes=0), LruMemory(6)
    for _ in range(11):
        play(ours, order)
        for event in order:
            lru.use(event)
    assert lru.fetched == 110
    assert ours.counts.read_bytes <= 10 + 10 * 5


def test_an_event_that_does_not_fit_is_refused() -> None:
    simulation = Simulation({0: 5, 1: 6}, 10, lookahead_bytes=10)
    simulation.use(Use(Event(0, (0,))))
    with pytest.raises(BudgetError, match="uses 11 bytes .* capacity of 10 bytes"):
        simulation.use(Use(Event(1, (0, 1))))


def chain(units: int, pieces: int, weight: int = 25, piece: int = 20) -> list[BlockSpec]:
    blocks: list[BlockSpec] = []
    for unit in range(units):
        for kind, nbytes in [
            (BlockKind.WEIGHT, weight),
            (BlockKind.GRADIENT, weight),
            *[(BlockKind.STATE, piece)] * pieces,
        ]:
            blocks.append(BlockSpec(len(blocks), f"unit{unit}.{kind.name}", kind, nbytes, unit))
    return blocks


@given(
    st.integers(2, 8),
    st.integers(1, 6),
    st.builds(Workload, st.integers(1, 3), st.sampled_from(StepOverlap)),
    st.floats(0, 1.1),
    st.booleans(),
)
def test_a_placement_runs_without_faults_and_moves_no_more_than_it_says(
    units: int, pieces: int, workload: Workload, share: float, write_behind: bool
) -> None:
    """From the least window with a unit ahead upwards, for every model, overlap and budget."""
    blocks = chain(units, pieces)
    sizes = {block.id: block.nbytes for block in blocks}
    least = 2 * 25 + 25 + 40
    placement = plan_placement(
        blocks,
        capacity_bytes=least + int(share * sum(sizes.values())),
        nvme_capacity_bytes=1 << 40,
        event_weight_bytes=25,
        bandwidths=DISK,
        workload=workload,
    )
    simulation = Simulation(
        sizes,
        placement.capacity_bytes,
        lookahead_bytes=placement.lookahead_bytes,
        static=placement.resident,
        empty=[block.id for block in blocks if block.kind is BlockKind.GRADIENT],
        write_behind=write_behind,
    )
    uses, discards = chain_uses(blocks, workload), seen_until_zero_grad(unit_blocks(blocks), workload)
    for _ in range(2):
        for use in uses:
            simulation.use(use)
        simulation.end_of_step(discards)
    counts, steps = simulation.counts, 4
    faults, read, written = counts.faults, counts.read_bytes, counts.written_bytes
    for _ in range(steps):
        for use in uses:
            simulation.use(use)
        simulation.end_of_step(discards)
    # The serial reference keeps gradients until zero_grad(), a guess until step(): a placement has no room for them.
    if not discards and workload.step_overlap is not StepOverlap.SPECULATIVE:
        assert counts.faults == faults
    assert counts.peak_bytes <= placement.capacity_bytes
    # What is in memory or dirty at the two ends may differ by what memory holds.
    assert counts.read_bytes - read <= steps * placement.traffic.read_bytes + placement.dynamic_bytes
    assert counts.written_bytes - written <= steps * placement.traffic.written_bytes + placement.dynamic_bytes


def test_the_expected_bytes_are_close_when_little_is_resident() -> None:
    """What the closed form leaves out is what Belady keeps between neighbouring uses in a small memory."""
    blocks, workload = chain(units=24, pieces=7), Workload(1, StepOverlap.DEFERRED)
    sizes = {block.id: block.nbytes for block in blocks}
    placement = plan_placement(
        blocks,
        capacity_bytes=150,
        nvme_capacity_bytes=1 << 40,
        event_weight_bytes=25,
        bandwidths=DISK,
        workload=workload,
    )
    gradients = [block.id for block in blocks if block.kind is BlockKind.GRADIENT]
    simulation = Simulation(
        sizes, 150, lookahead_bytes=placement.lookahead_bytes, static=placement.resident, empty=gradients
    )
    uses = chain_uses(blocks, workload)
    for _ in range(6):
        for use in uses:
            simulation.use(use)
        simulation.end_of_step()
    moved = simulation.counts.read_bytes + simulation.counts.written_bytes
    expected = 6 * (placement.traffic.read_bytes + placement.traffic.written_bytes)
    assert 0.94 * expected <= moved <= expected


@pytest.mark.parametrize("overlap", StepOverlap)
def test_step_uses_reads_every_block_as_the_overlap_says(overlap: StepOverlap) -> None:
    blocks = chain(units=2, pieces=2)
    uses = chain_uses(blocks, Workload(2, overlap))
    assert len(uses) == 2 * 2 * 2 + 2 * 2
    updates = [index for index, use in enumerate(uses) if len(use.event.blocks) == 3]
    assert (
        updates
        == {
            StepOverlap.NONE: [8, 9, 10, 11],
            StepOverlap.DEFERRED: [0, 1, 3, 4],
            StepOverlap.IN_BACKWARD: [7, 8, 10, 11],
            StepOverlap.SPECULATIVE: [0, 1, 9, 10],
        }[overlap]
    )
    kept = overlap is StepOverlap.NONE  # until zero_grad()
    if overlap is StepOverlap.SPECULATIVE:  # one of two units is guessed, and its gradients are needed until step()
        assert [len(use.drops) for use in uses] == [0, 1, *[0] * 9, 1]
    else:
        assert [len(uses[index].drops) for index in updates] == ([0, 0, 0, 0] if kept else [0, 1, 0, 1])
    assert seen_until_zero_grad(unit_blocks(blocks), Workload(2, overlap)) == ([1, 5] if kept else [])
    forward = [(Phase.FORWARD, (unit,)) for unit in range(2)]
    expected = [Use(Event(forward[0], (0,))), Use(Event(forward[1], (4,)))]
    assert chain_uses(blocks, Workload(training=False)) == expected


@pytest.mark.parametrize("overlap", StepOverlap)
@pytest.mark.parametrize("steps", [1, 2])
def test_every_visit_belongs_to_a_use_that_is_no_update(overlap: StepOverlap, steps: int) -> None:
    """Also those that use no weights: before the first unit, between units, and after the last landing."""
    units = [0, 1]
    visits = [ChainVisit(False, (), {})]
    visits += [visit for unit in units for visit in (ChainVisit(False, (unit,), {}), ChainVisit(False, (), {}))]
    for unit in reversed(units):
        visits += [ChainVisit(True, (unit,), {unit: 1}), ChainVisit(True, (), {})]
    uses = step_uses(visits, unit_blocks(chain(units=2, pieces=2)), Workload(steps, overlap))
    assert all(bool(use.visits) is (use.phase is not Phase.UPDATE) for use in uses)
    assert sorted(number for use in uses for number in use.visits) == sorted([*range(len(visits))] * steps)
