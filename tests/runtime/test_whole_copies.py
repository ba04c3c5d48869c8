"""How a rank's host budget is divided between its blocks, whole copies, and gradients on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepoffload.config import Config, parse_config
from deepoffload.errors import PlacementError
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.ranks.places import RankMap
from deepoffload.ranks.planned import PlannedExchange
from deepoffload.runtime.choice import Room, choose, window_bytes
from deepoffload.runtime.plan import NO_DISK, cutter_of, dry_pager, refusal_of
from deepoffload.runtime.whole_copies import CopySizes, contribution_bytes
from deepoffload.schedule.placement import BlockKind

MB = 1 << 20


def a_link(world_size: int) -> Any:
    ranks = RankMap(0, (0,) * world_size)
    return SimpleNamespace(ranks=ranks, exchange=PlannedExchange("memory", ranks))


def a_model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(6)))


def chosen(capacity_bytes: int, world_size: int, config: Config, nvme_bytes: int | None = 1 << 30) -> Any:
    model, link = a_model(), a_link(world_size)
    pager, gradients, handles = dry_pager(model, link=link)
    cutter = cutter_of(pager, gradients, config, [model], handles)
    return choose(cutter, config, Room(capacity_bytes, nvme_bytes, NO_DISK, 0, link.exchange)), link.exchange


CONFIG = parse_config({"bf16": {"enabled": True}})


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("capacity_mb", [3, 6, 12, 24, 48, 96])
def test_the_budget_holds_all_there_is(world_size: int, capacity_mb: int) -> None:
    try:
        choice, exchange = chosen(capacity_mb * MB, world_size, CONFIG)
    except PlacementError as error:
        assert error.enough_bytes is not None and error.enough_bytes > capacity_mb * MB
        assert f"to at least {error.enough_bytes} bytes, of which" in str(error)
        chosen(error.enough_bytes, world_size, CONFIG)
        with pytest.raises(PlacementError):
            chosen(error.enough_bytes - PAGE_BYTES, world_size, CONFIG)
        return
    others = contribution_bytes(choice.cut.division.drafts, exchange, capacity_mb * MB)
    assert choice.placement.capacity_bytes + choice.copies_bytes + others == capacity_mb * MB
    whole = [unit.whole_weight_bytes for unit in choice.sizes]
    gradient = max(unit.whole_gradient_bytes for unit in choice.sizes)
    assert choice.copies_bytes >= gradient + max(n for _, n in window_bytes(choice.cut, choice.sizes))
    assert choice.copies_bytes <= gradient + sum(whole)


@pytest.mark.parametrize("nvme_bytes", [None, 1 << 30])
def test_with_room_everything_stays_and_all_weights_are_whole(nvme_bytes: int | None) -> None:
    choice, _ = chosen(256 * MB, 2, CONFIG, nvme_bytes)
    gradient = max(unit.whole_gradient_bytes for unit in choice.sizes)
    assert choice.copies_bytes == gradient + sum(unit.whole_weight_bytes for unit in choice.sizes)
    assert not choice.placement.paged


def test_what_shards_leave_is_for_copies_where_nothing_has_to_go_to_nvme() -> None:
    """Room for all shards and for some of the whole copies."""
    most, exchange = chosen(256 * MB, 4, CONFIG)
    stored = sum(block.room_bytes * block.count for unit in most.sizes for block in unit.blocks)
    others = contribution_bytes(most.cut.division.drafts, exchange, 24 * MB)
    capacity = stored + others + most.copies_bytes * 3 // 4 // PAGE_BYTES * PAGE_BYTES
    choice, exchange = chosen(capacity, 4, CONFIG)
    assert not choice.placement.paged
    others = contribution_bytes(choice.cut.division.drafts, exchange, capacity)
    stored = sum(block.room_bytes * block.count for unit in choice.sizes for block in unit.blocks)
    assert choice.copies_bytes == capacity - others - stored


def test_the_model_of_one_rank_is_planned_as_before() -> None:
    model = a_model()
    pager, gradients, handles = dry_pager(model)
    choice = choose(cutter_of(pager, gradients, CONFIG, [model], handles), CONFIG, Room(8 * MB, 1 << 30, NO_DISK))
    assert choice.copies_bytes == 0
    assert choice.placement.capacity_bytes == 8 * MB
    for unit in choice.sizes:
        assert unit.whole_weight_bytes == unit.room_bytes(BlockKind.WEIGHT)


def test_a_refusal_of_a_dry_plan_names_the_same_budget() -> None:
    with pytest.raises(PlacementError) as caught:
        chosen(MB, 2, CONFIG)
    refusal = refusal_of([a_model()], CONFIG, capacity_bytes=MB, nvme_bytes=1 << 30, bandwidths=NO_DISK, link=a_link(2))
    assert refusal is not None and refusal.enough_bytes == caught.value.enough_bytes


SIZES = st.integers(0, 1 << 30).map(lambda n: n // PAGE_BYTES * PAGE_BYTES)


@given(SIZES, SIZES, SIZES, SIZES)
def test_choices_end_with_the_least(least: int, more: int, stored: int, capacity: int) -> None:
    sizes = CopySizes(least, least + more, stored)
    found = list(sizes.choices(capacity))
    assert found[-1] == least
    assert all(least <= nbytes <= least + more for nbytes in found)
    assert len(set(found)) == len(found)
    if stored + least + more <= capacity:
        assert found[0] == least + more
