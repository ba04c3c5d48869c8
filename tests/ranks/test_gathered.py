"""Whole copies of what ranks store in shards: real processes on gloo, by both transports, without models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import gather_programs as programs
from tests.ranks.gather_side import SIZES
from tests.support.rank_processes import SOON_S, run_ranks, values_of, values_of_each

TRANSPORTS = ("group", "memory")
UNITS = len(SIZES)

both_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def by_both(program: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What all ranks return by the one transport, and then, in the same processes, by the other."""
    found = values_of_each(program, world_size, [(transport, *arguments) for transport in TRANSPORTS])
    return [value for ranks in found for value in ranks]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_copy_is_made_of_all_shards(world_size: int) -> None:
    for stats in by_both(programs.read_everything, world_size):
        assert stats["device_faults"] == UNITS
        assert stats["rounds"] >= UNITS


def test_what_the_program_writes_is_stored_as_far_as_a_rank_owns_it() -> None:
    by_both(programs.edit, 3)


def test_what_was_written_is_stored_before_others_gather_it() -> None:
    assert all(gathers >= 2 for gathers in by_both(programs.be_served_what_was_written, 3))


def test_units_that_are_used_next_are_gathered_in_advance() -> None:
    results = by_both(programs.prefetch, 2)
    for stats in results:
        assert stats["device_faults"] <= 4
        assert stats["device_prefetches"] >= 4 * (UNITS - 1)
    if all(stats["rounds_answered"] == 0 for stats in results):
        assert all(stats["mixed_rounds"] == 0 for stats in results)


@both_transports
def test_copies_and_shards_leave_for_others(transport: str, tmp_path: Path) -> None:
    rooms = [(60, 1000), (60, 92), (100, 132)]
    calls = [(transport, str(tmp_path), copy_pages * 4096, host_pages * 4096) for copy_pages, host_pages in rooms]
    for room, ranks in zip(rooms, values_of_each(programs.have_little_room, 2, calls), strict=True):
        for stats in ranks:
            assert stats["device_evictions"] > 0 or room[0] == 100
            assert stats["evicted"] > 0 or room[1] == 1000


def test_copies_in_use_that_leave_no_room_are_an_error() -> None:
    for said in by_both(programs.need_more_than_there_is, 2):
        assert said.startswith("layer 2 needs") and "Raise host_budget" in said, said
        assert "layer 0: " in said and "in use" in said


@both_transports
def test_ranks_that_are_elsewhere_serve_one_that_reads_alone(transport: str, tmp_path: Path) -> None:
    alone, *others = values_of(programs.read_alone, 3, transport, str(tmp_path))
    assert alone["nudges"] > 0
    assert all(other["gathers"] == 1 and other["device_faults"] == 1 for other in others)


def test_views_of_a_copy_show_what_is_stored_later() -> None:
    assert by_both(programs.hold_views, 2) == [3] * 4


@both_transports
def test_an_update_that_is_to_come_is_made_before_a_shard_is_given(transport: str, tmp_path: Path) -> None:
    values_of(programs.update_when_served, 2, transport, str(tmp_path))


def test_bytes_are_lost_while_their_copy_comes() -> None:
    by_both(programs.forget_what_comes, 2)


@both_transports
@pytest.mark.parametrize("what", ["SIGKILL", "raise"])
def test_a_rank_that_goes_is_named_by_all_others(transport: str, what: str) -> None:
    ended = run_ranks(programs.lose_a_rank, 3, transport, what)
    gone = ended.pop()
    assert gone.exit_code == -9 if what == "SIGKILL" else gone.value[:2] == ("ValueError", "the batch is empty")
    assert all(one.error is None for one in ended), "\n".join(one.text for one in ended)
    texts = {one.value[1] for one in ended}
    assert len(texts) == 1
    died = r"rank 2 has gone; rank 0('s program)? (was|did)"
    expected = died if what == "SIGKILL" else "rank 2 has failed at .*ValueError: the batch"
    assert re.match(expected, texts.pop())
    assert all(one.value[0] == "RankError" and one.value[2] < SOON_S for one in ended)


@both_transports
def test_a_wait_with_the_lock_hears_ctrl_c(transport: str, tmp_path: Path) -> None:
    heard_s, _ = values_of(programs.interrupt, 2, transport, str(tmp_path))
    assert 0 < heard_s < SOON_S


@both_transports
@pytest.mark.parametrize(("world_size", "host_pages"), [(2, 1000), (3, 168)])
def test_programs_that_differ_read_no_torn_and_no_old_bytes(
    transport: str, world_size: int, host_pages: int, tmp_path: Path
) -> None:
    values_of(programs.do_anything, world_size, transport, str(tmp_path), range(3), host_pages * 4096)
