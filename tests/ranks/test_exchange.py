"""Payload gets from rank to rank, the same bytes by either transport, and nobody waits without end."""

from __future__ import annotations

import pytest

from tests.ranks import moving
from tests.support.rank_processes import SOON_S, run_ranks, values_of, values_of_each

TRANSPORTS = ("group", "memory")


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_byte_arrives_and_both_transports_count_the_same(world_size):
    by_group, by_memory = values_of_each(moving.move_everything, world_size, [("group",), ("memory",)])
    for group, memory in zip(by_group, by_memory, strict=True):
        assert group["transport"] == "group" and group["hosts"] == (0,) * world_size
        assert group["gather_bytes"] and group["part_bytes"]
        assert group | {"transport": "memory"} == memory


@pytest.mark.parametrize("after_s", [0.05, 0.3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_neighbour_that_is_killed_is_an_error_and_never_half_a_unit(transport, after_s):
    survivor, killed = run_ranks(moving.die_while_others_read, 2, transport, after_s)
    assert killed.exit_code == -9
    assert survivor.error == "RankError", survivor
    text = survivor.text.partition("rank 0 at gather of layer 3: ")[2]
    if transport == "memory":
        assert text.startswith("rank 1 cannot be read: it has gone"), survivor
    else:  # what gloo says, or what we find out when it does not
        assert text.startswith(("another rank has gone", "rank 1 has gone, its connection is closed")), survivor
    assert survivor.seconds < killed.seconds + SOON_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_named_when_the_limit_is_over(transport):
    waiting, _ = run_ranks(moving.stay_away, 2, transport, 4.0)
    assert waiting.error == "RankError", waiting
    who = "rank 1 has not" if transport == "memory" else "not every rank has"
    assert f"rank 0 at gather of layer 1: {who} come to it within 4 s" in waiting.text
    assert waiting.seconds < SOON_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_stopped_is_noticed_when_the_limit_is_over(transport):
    waiting, stopped = run_ranks(moving.wait_for_a_stopped_rank, 2, transport, 4.0)
    assert stopped.exit_code == -9
    assert waiting.error is None, waiting
    assert waiting.value < SOON_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_slow_is_waited_for(transport):
    values_of(moving.wait_for_a_slow_rank, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_gives_up_has_its_memory_back_and_the_others_are_told(transport):
    gave_up, other = run_ranks(moving.end_while_a_transfer_is_under_way, 2, transport)
    assert gave_up.value == (False, True), gave_up
    assert other.error == "RankError"
    assert "rank 1 at gather of layer 1: " in other.text
    assert other.seconds < SOON_S


def test_a_group_that_is_kept_does_not_wait_for_its_collectives():
    seconds, _ = values_of(moving.keep_a_group, 2)
    assert seconds < SOON_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wait_hears_ctrl_c(transport):
    heard_s, _ = values_of(moving.interrupt, 2, transport)
    assert heard_s < SOON_S


def test_ranks_at_different_units_find_out():
    for rank, one in enumerate(run_ranks(moving.offer_something_else, 2, "memory")):
        assert one.error == "RankError"
        assert f"rank {1 - rank} offers {32 + 32 * (1 - rank)} bytes, not {32 + 32 * rank}" in one.text


def test_where_reading_is_forbidden_the_group_carries_the_payload():
    assert values_of(moving.forbid_reading, 2, "auto") == [("group", True)] * 2


def test_where_reading_is_forbidden_memory_cannot_be_asked_for():
    texts = set()
    for one in run_ranks(moving.forbid_reading, 2, "memory"):
        assert one.error == "UnsupportedError"
        texts.add(one.text.splitlines()[-1])
    assert len(texts) == 1
    assert "rank 0 cannot read the memory of rank 1: the system forbids it" in texts.pop()


def test_ranks_that_ask_for_different_transports_all_say_so():
    for one in run_ranks(moving.ask_for, 2, "auto", "group"):
        assert one.error == "ConfigError"
        assert "ranks.transport: rank 0 has 'auto' and rank 1 has 'group'" in one.text
