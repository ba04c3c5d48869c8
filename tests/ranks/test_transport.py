"""Which transport is chosen, and what the line that says it says."""

from __future__ import annotations

import pytest
import torch

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.native.cpu_adam import SUM_BLOCK
from deepoffload.ranks.exchange import CHUNK_NUMEL, chunk_ranges
from deepoffload.ranks.places import RankMap
from deepoffload.ranks.transport import agree, choose, why_not_memory

CPU = torch.device("cpu")


def test_ranges_of_parts_are_whole_blocks_of_sums():
    assert CHUNK_NUMEL % SUM_BLOCK == 0
    assert list(chunk_ranges(2 * CHUNK_NUMEL + 1))[1:] == [(CHUNK_NUMEL, CHUNK_NUMEL), (2 * CHUNK_NUMEL, 1)]


@pytest.mark.parametrize(
    ("asked", "obstacle", "transport", "reason"),
    [
        ("auto", None, "memory", "every rank can read"),
        ("memory", None, "memory", "every rank can read"),
        ("auto", "the ranks run on 2 hosts", "group", "the ranks run on 2 hosts"),
        ("group", None, "group", "asks for it"),
        ("group", "the ranks run on 2 hosts", "group", "asks for it"),
    ],
)
def test_choice(asked, obstacle, transport, reason):
    choice = choose(asked, obstacle)
    assert choice.transport == transport and reason in choice.reason


def test_what_is_asked_for_and_cannot_be_is_an_error():
    with pytest.raises(UnsupportedError, match=r"asks for 'memory', but the tensors are on cuda. Ask for 'auto'"):
        choose("memory", "the tensors are on cuda")


def test_ranks_agree():
    assert agree(["auto", "auto"]) == "auto"
    with pytest.raises(ConfigError, match="rank 0 has 'auto' and rank 2 has 'group'"):
        agree(["auto", "auto", "group"])
    with pytest.raises(ConfigError, match="'shared' is none of auto, group, memory"):
        agree(["shared", "shared"])


def test_obstacles_that_are_known_without_trying():
    one, two = RankMap(0, (0, 0)), RankMap(0, (0, 1))
    assert why_not_memory(one, CPU) is None
    assert why_not_memory(two, CPU) == "the ranks run on 2 hosts"
    assert why_not_memory(one, torch.device("cuda")) == "the tensors are on cuda"
