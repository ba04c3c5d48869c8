"""Placement keeps the budgets, prefers what saves most, and says what to change when it cannot be done."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepoffload.errors import PlacementError
from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Workload
from deepoffload.schedule.placement import BlockSpec, Placement
from tests.support.placing import plan_placement

MIB = 1 << 20
DISK = Bandwidths(2.1e9, 2.5e9, 2.7e9, 5e10)


def chain(units: int, pieces: int, weight: int = 24 * MIB, piece: int = 20 * MIB) -> list[BlockSpec]:
    """Units of one weight block, one gradient block and some state pieces."""
    blocks: list[BlockSpec] = []
    for unit in range(units):
        parts = [(BlockKind.WEIGHT, weight), (BlockKind.GRADIENT, weight), *[(BlockKind.STATE, piece)] * pieces]
        for kind, nbytes in parts:
            blocks.append(BlockSpec(len(blocks), f"unit{unit}.{kind.name}", kind, nbytes, unit))
    return blocks


def place(blocks: Sequence[BlockSpec], capacity_bytes: int, nvme: int | None = 1 << 50, **more: Any) -> Placement:
    weights = [block.nbytes for block in blocks if block.kind is BlockKind.WEIGHT]
    more = {"event_weight_bytes": max(weights, default=0), "workload": Workload(), "bandwidths": DISK, **more}
    return plan_placement(blocks, capacity_bytes=capacity_bytes, nvme_capacity_bytes=nvme, **more)


def kept(placement: Placement, kind: BlockKind) -> int:
    return sum(block.id in placement.resident for block in placement.blocks if block.kind is kind)


sizes = st.integers(1, 50)


@st.composite
def models(draw: st.DrawFn) -> list[BlockSpec]:
    blocks: list[BlockSpec] = []
    for unit in range(draw(st.integers(1, 8))):
        trained = draw(st.booleans())
        kinds = (
            [BlockKind.WEIGHT] + [BlockKind.GRADIENT] * trained + [BlockKind.STATE] * trained * draw(st.integers(1, 6))
        )
        blocks += [
            BlockSpec(len(blocks) + at, f"u{unit}.{kind.name}", kind, draw(sizes), unit)
            for at, kind in enumerate(kinds)
        ]
    return blocks


workloads = st.builds(Workload, st.integers(1, 4), st.sampled_from(StepOverlap), st.booleans())


@given(models(), st.integers(0, 600), workloads, st.integers(0, 6))
def test_a_placement_keeps_the_budget_and_covers_every_block(
    blocks: list[BlockSpec], capacity: int, workload: Workload, ring_pieces: int
) -> None:
    try:
        placement = place(blocks, capacity, workload=workload, ring_pieces=ring_pieces)
    except PlacementError:
        return
    by_id = {block.id: block.nbytes for block in blocks}
    assert placement.resident | placement.paged == set(by_id)
    assert not placement.resident & placement.paged
    assert placement.resident_bytes == sum(by_id[block] for block in placement.resident)
    assert placement.resident_bytes + placement.dynamic_bytes == capacity
    assert placement.window.nbytes <= placement.dynamic_bytes
    assert placement.dynamic_bytes <= placement.lookahead_bytes <= capacity
    assert placement.nvme_bytes == sum(by_id[block] for block in placement.paged)
    if sum(by_id.values()) <= capacity:
        assert not placement.paged
        assert placement.traffic.read_bytes == placement.traffic.written_bytes == placement.disk_seconds == 0


@given(models(), workloads, st.integers(0, 600))
def test_the_minimum_is_exact_and_what_the_error_says(
    blocks: list[BlockSpec], workload: Workload, capacity: int
) -> None:
    minimum = place(blocks, 1 << 40, workload=workload).minimum_bytes
    if capacity >= minimum:
        assert place(blocks, capacity, workload=workload).minimum_bytes == minimum
    else:
        with pytest.raises(PlacementError, match=rf"needs at least .* \({minimum} bytes\).*host_budget"):
            place(blocks, capacity, workload=workload)


@given(models(), workloads, st.integers(0, 600))
def test_the_window_holds_an_event_of_paged_blocks_and_two_state_pieces(
    blocks: list[BlockSpec], workload: Workload, capacity: int
) -> None:
    try:
        placement = place(blocks, capacity, workload=workload)
    except PlacementError:
        assume(False)
    paged = {kind: [b.nbytes for b in blocks if b.kind is kind and b.id in placement.paged] for kind in BlockKind}
    window = placement.window
    assert window.weight_bytes >= max(paged[BlockKind.WEIGHT], default=0)
    assert window.gradient_bytes >= max(paged[BlockKind.GRADIENT], default=0)
    assert window.ring_bytes >= min(2 * max(paged[BlockKind.STATE], default=0), sum(paged[BlockKind.STATE]))


@given(models(), workloads)
def test_more_memory_never_moves_more_bytes_once_the_window_is_full(
    blocks: list[BlockSpec], workload: Workload
) -> None:
    """In the order of worth, memory beyond the window goes to blocks. (Blocks of mixed sizes may swap places.)"""
    equal = [BlockSpec(block.id, block.name, block.kind, 10, block.unit) for block in blocks]
    seconds = []
    for capacity in range(0, 10 * len(equal) + 1, 10):
        try:
            placement = place(equal, capacity, workload=workload, ring_pieces=2)
        except PlacementError:
            continue
        if placement.window.prefetches_weights or placement.window.weight_bytes == 0:
            seconds.append(placement.disk_seconds)
    assert all(more <= less * (1 + 1e-9) for less, more in zip(seconds, seconds[1:], strict=False))
    assert seconds[-1] == 0


@given(models(), workloads, st.integers(0, 600))
def test_the_same_question_has_the_same_answer(blocks: list[BlockSpec], workload: Workload, capacity: int) -> None:
    try:
        assert place(blocks, capacity, workload=workload) == place(blocks, capacity, workload=workload)
    except PlacementError:
        with pytest.raises(PlacementError):
            place(blocks, capacity, workload=workload)


def test_weights_before_gradients_before_state() -> None:
    blocks = chain(units=20, pieces=6)
    all_weights = 20 * 24 * MIB
    placement = place(blocks, all_weights + 400 * MIB)
    assert kept(placement, BlockKind.WEIGHT) == 20
    assert kept(placement, BlockKind.STATE) == 0
    placement = place(blocks, 2 * all_weights + 800 * MIB)
    assert (kept(placement, BlockKind.WEIGHT), kept(placement, BlockKind.GRADIENT)) == (20, 20)
    assert kept(placement, BlockKind.STATE) == (800 - 16 * 20) // 20


def test_half_of_the_state_halves_its_traffic() -> None:
    blocks = chain(units=20, pieces=20)
    state = 20 * 20 * 20 * MIB
    placement = place(blocks, 2 * 20 * 24 * MIB + 16 * 20 * MIB + state // 2)
    assert placement.traffic.read_bytes == placement.traffic.written_bytes == state // 2


def test_a_gradient_that_is_applied_in_backward_is_worth_no_memory() -> None:
    blocks = chain(units=20, pieces=6)
    placement = place(blocks, 20 * 24 * MIB + 600 * MIB, workload=Workload(1, StepOverlap.IN_BACKWARD))
    assert kept(placement, BlockKind.GRADIENT) == 0
    assert kept(placement, BlockKind.STATE) > 0


def test_scarce_memory_is_window_before_anything_is_resident() -> None:
    blocks = chain(units=20, pieces=6)
    small = BlockSpec(len(blocks), "small", BlockKind.STATE, MIB, 0)
    placement = place([*blocks, small], 256 * MIB)
    assert not placement.resident
    assert placement.window.prefetches_weights
    assert placement.window.ring_pieces == (256 - 3 * 24) // 20
    assert placement.dynamic_bytes == 256 * MIB


def test_at_the_minimum_the_second_unit_is_given_up() -> None:
    blocks = chain(units=20, pieces=6)
    placement = place(blocks, (24 + 24 + 40) * MIB)
    assert placement.minimum_bytes == (24 + 24 + 40) * MIB
    assert not placement.window.prefetches_weights
    assert place(blocks, (24 + 24 + 40 + 24) * MIB).window.prefetches_weights


def test_an_event_may_use_more_weights_than_one_block_has() -> None:
    blocks = chain(units=20, pieces=6)
    assert place(blocks, 400 * MIB, event_weight_bytes=72 * MIB).minimum_bytes == (72 + 24 + 40) * MIB


def test_a_block_of_weights_is_the_least_that_an_event_uses() -> None:
    assert place(chain(units=20, pieces=6), 400 * MIB, event_weight_bytes=0).minimum_bytes == (24 + 24 + 40) * MIB


def test_the_ring_is_no_larger_than_what_passes_through_it() -> None:
    weights = [BlockSpec(unit, f"u{unit}.w", BlockKind.WEIGHT, 24 * MIB, unit) for unit in range(20)]
    placement = place([*weights, BlockSpec(20, "s", BlockKind.STATE, 20 * MIB, 0)], 100 * MIB)
    assert (placement.window.ring_bytes, placement.window.ring_pieces) == (20 * MIB, 1)
    assert kept(placement, BlockKind.WEIGHT) == 1  # 48 MiB of weights, 20 MiB of ring, 24 MiB resident


def test_memory_is_filled_to_the_byte_and_not_beyond() -> None:
    sizes = [50, 30, 20, 10, 5]
    blocks = [BlockSpec(unit, f"u{unit}", BlockKind.WEIGHT, nbytes, unit) for unit, nbytes in enumerate(sizes)]
    inference = Workload(training=False)
    for capacity, resident in ((104, set()), (109, {4}), (110, {3}), (114, {3}), (115, {0, 1, 2, 3, 4})):
        assert place(blocks, capacity, workload=inference).resident == resident  # next to a window of 100


def test_frozen_units_are_never_written() -> None:
    blocks = [BlockSpec(unit, f"u{unit}", BlockKind.WEIGHT, 10, unit) for unit in range(10)]
    assert place(blocks, 20).traffic.written_bytes == 0
    trained = [*blocks, BlockSpec(10, "g", BlockKind.GRADIENT, 10, 9)]
    assert place(trained, 30).traffic.written_bytes == 20


def test_without_nvme_everything_must_fit() -> None:
    blocks = chain(units=2, pieces=2)
    total = sum(block.nbytes for block in blocks)
    assert not place(blocks, total, None).paged
    with pytest.raises(PlacementError, match=rf"{total} bytes.*no NVMe.*Set nvme_path.*raise host_budget") as caught:
        place(blocks, total - 1, None)
    assert "optimizer state" in str(caught.value)


def test_nvme_must_hold_what_is_paged() -> None:
    blocks = chain(units=20, pieces=6)
    wanted = place(blocks, 400 * MIB).nvme_bytes
    assert place(blocks, 400 * MIB, wanted).nvme_bytes == wanted
    with pytest.raises(PlacementError, match=r"NVMe must hold .* bytes\).*Raise nvme_budget.*nvme_path") as refused:
        place(blocks, 400 * MIB, 1)
    least = refused.value.enough_nvme_bytes
    assert least is not None and least < wanted, "less window, more blocks that stay"
    assert place(blocks, 400 * MIB, wanted - 1).nvme_bytes == least
    assert place(blocks, 400 * MIB, least).nvme_bytes == least
    with pytest.raises(PlacementError, match=rf"\({least} bytes\) but has .* to at least {least} bytes"):
        place(blocks, 400 * MIB, least - 1)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_the_rates_of_the_disk_do_not_decide_what_nvme_is_enough(read: int, write: int, mixed: int) -> None:
    """They differ from run to run. Frozen units cost reads only, so their worth next to state depends on the rates."""
    blocks = [b for b in chain(units=12, pieces=4) if b.kind is BlockKind.WEIGHT or b.unit % 3 == 0]
    rates = Bandwidths(1e9 * read, 1e9 * write, 1e9 * mixed, 2e10)
    with pytest.raises(PlacementError) as refused:
        place(blocks, 200 * MIB, 1, bandwidths=rates)
    with pytest.raises(PlacementError) as usual:
        place(blocks, 200 * MIB, 1)
    assert refused.value.enough_nvme_bytes == usual.value.enough_nvme_bytes is not None


def test_a_model_without_optimizer_needs_no_ring() -> None:
    blocks = [BlockSpec(unit, f"u{unit}", BlockKind.WEIGHT, 10, unit) for unit in range(10)]
    placement = place(blocks, 30, workload=Workload(training=False))
    assert placement.window.nbytes == 20
    assert len(placement.resident) == 1
    assert (placement.traffic.read_bytes, placement.traffic.written_bytes) == (90, 0)


def test_an_empty_model_is_placed() -> None:
    placement = place([], 0, None)
    assert (placement.minimum_bytes, placement.nvme_bytes, placement.resident) == (0, 0, frozenset())


def test_ids_must_be_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        place([BlockSpec(1, "a", BlockKind.WEIGHT, 1, 0), BlockSpec(1, "b", BlockKind.WEIGHT, 1, 0)], 10)


def test_the_table_says_where_everything_is_and_why() -> None:
    placement = place(chain(units=20, pieces=6), 1000 * MIB, num_parameters=20 * 12 * MIB)
    table = placement.table()
    lines = table.splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "weights",
        "gradients",
        "optimizer state",
        "windows + ring",
        "total",
    ]
    assert re.search(r"weights +480\.0 MiB +- +20/20 +- +- +all fit", table)
    assert re.search(r"gradients +168\.0 MiB +312\.0 MiB +7/20 +312\.0 MiB +312\.0 MiB +13 of 20 have no room", table)
    assert re.search(r"windows \+ ring +352\.0 MiB .*24\.0 MiB for gradients, 320\.0 MiB for 16 state pieces", table)
    assert re.search(r"total +1000\.0 MiB", table)
    assert "budget: 1000.0 MiB of memory (88.0 MiB needed at once), NVMe 1.0 PiB" in table
    assert "bytes per parameter" in lines[-1]
    columns = [re.search(r"\d+/\d+", line) for line in lines[1:4]]
    assert len({match.end() for match in columns if match}) == 1  # aligned to the right


def test_the_table_of_a_model_that_fits_says_that_nothing_moves() -> None:
    table = place(chain(2, 2), 1 << 40, None).table()
    assert table.count("everything fits") == 3
    assert table.splitlines()[-1] == "expected per step: nothing moves"


def test_the_table_of_ranks_says_what_one_of_them_has_and_what_all_of_a_host_have() -> None:
    table = place(chain(units=20, pieces=6), 1000 * MIB).table(2)
    assert re.search(r"^ +memory, one rank +of 2 ranks +NVMe, one rank +of 2 ranks +blocks", table)
    assert re.search(r"weights +480\.0 MiB +960\.0 MiB +- +- +20/20", table)
    assert re.search(r"gradients +168\.0 MiB +336\.0 MiB +312\.0 MiB +624\.0 MiB +7/20", table)
    assert "budget of each of the 2 ranks: " in table
