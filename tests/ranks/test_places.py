"""Which ranks share a host, by what each says of itself."""

from __future__ import annotations

import pytest

from deepoffload.ranks.places import Launch, RankMap, RankPlace, read_launch, tell_hosts_apart, this_place


def launched(rank: int, local_rank: int, local_world_size: int, host: str = "a") -> RankPlace:
    return RankPlace(host, f"boot of {host}", rank - local_rank, local_world_size)


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([RankPlace("a", "1"), RankPlace("a", "1"), RankPlace("b", "2")], (0, 0, 1)),
        ([RankPlace("a", "1"), RankPlace("a", "2")], (0, 1)),  # two machines of one name
        ([RankPlace("node", ""), RankPlace("node", "")], (0, 0)),
        # torchrun, several processes per host; the two agents of the second case run on one machine
        ([launched(r, r % 2, 2, "ab"[r // 2]) for r in range(4)], (0, 0, 1, 1)),
        ([launched(r, r % 2, 2) for r in range(4)], (0, 0, 1, 1)),
        ([launched(0, 0, 1), launched(1, 0, 3, "b"), launched(2, 1, 3, "b"), launched(3, 2, 3, "b")], (0, 1, 1, 1)),
        # a group of some ranks only
        ([launched(1, 1, 2), launched(3, 1, 2, "b")], (0, 1)),
        # one rank's launcher says nothing, or ranks go round the hosts: names and boots decide
        ([launched(0, 0, 2), RankPlace("a", "boot of a")], (0, 0)),
        ([launched(r, r // 2, 2, "ab"[r % 2]) for r in range(4)], (0, 1, 0, 1)),
        # more ranks than a launcher says it has started
        ([launched(0, 0, 1), launched(0, 0, 1)], (0, 0)),
    ],
)
def test_hosts(places, hosts):
    assert tell_hosts_apart(places) == hosts


def test_ranks_of_a_host_do_not_have_to_follow_each_other():
    ranks = RankMap(2, (0, 1, 0, 1))
    assert (ranks.world_size, ranks.host_count, ranks.host_ranks, ranks.local_rank) == (4, 2, (0, 2), 1)
    assert RankMap(3, (0, 1, 0, 1)).host_ranks == (1, 3)


def test_what_a_launcher_says():
    said = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch(said) == Launch(3, 4, 1, 2)
    assert read_launch({"WORLD_SIZE": "4", "RANK": "3"}) == Launch(3, 4)
    assert read_launch({"WORLD_SIZE": "1", "RANK": "7"}) is None
    assert this_place(Launch(3, 4, 1, 2)).first_rank == 2
    here = this_place(None)
    assert here.first_rank is None and here.host_name
