"""Ranks hear at once that one of them does not come to a model's groups, and why. In threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from deepoffload.errors import DeepOffloadError
from deepoffload.ranks.openings import Openings

LONG_S, SOON_S = 10.0, 50.0
ERROR = ("ConfigError", "reading mesh=", "mesh= has 2 dimensions")
TEXT = "ConfigError: rank 1 has failed at reading mesh=: mesh= has 2 dimensions"


def said(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        found = call(*arguments)
    except DeepOffloadError as error:
        found = error
    return "" if found is None else f"{type(found).__name__}: {found}"


def together(*programs: Callable[[Openings], Any], store: dist.Store | None = None) -> list[Any]:
    """What each rank's program returns."""
    store = dist.HashStore() if store is None else store
    store.set_timeout(timedelta(seconds=LONG_S))
    with ThreadPoolExecutor(len(programs)) as threads:
        runs = [threads.submit(program, Openings(store, rank)) for rank, program in enumerate(programs)]
        return [run.result(SOON_S) for run in runs]


def come(*members: int, limit_s: float = LONG_S) -> Callable[[Openings], str]:
    return lambda openings: said(openings.come, members, limit_s)


def fail(*hearers: int, error: tuple[str, str, str] = ERROR, members: Any = None) -> Callable[[Openings], str]:
    return lambda openings: said(openings.fail, error, members, hearers, LONG_S)


def in_turn(*programs: Callable[[Openings], Any]) -> Callable[[Openings], list[Any]]:
    return lambda openings: [program(openings) for program in programs]


def test_those_that_wait_for_a_rank_that_fails_hear_it_and_meet_it_the_next_time() -> None:
    first, second = in_turn(come(0, 1, 2), come(0, 1, 2), come(0, 2)), in_turn(fail(0, 2), come(0, 1, 2))
    assert together(first, second, first) == [[TEXT, "", ""], [TEXT, ""], [TEXT, "", ""]]


def test_a_rank_that_comes_late_hears_what_the_others_have_heard() -> None:
    store = dist.HashStore()
    early = together(come(0, 1, 2, limit_s=0.2), come(0, 1, 2), store=store)
    assert (
        early[0] == early[1] and "RankError: rank 2 has not come to building a model with ranks 0, 1 and 2" in early[0]
    )
    assert said(Openings(store, 2).come, (0, 1, 2), LONG_S) == early[0]
    assert together(*[come(0, 1, 2)] * 3, store=store) == [""] * 3


def test_those_that_do_not_wait_for_it_hear_nothing() -> None:
    pair = come(0, 2)
    everybody = come(0, 1, 2, 3)
    assert together(
        in_turn(pair, everybody), in_turn(fail(3, members=(1, 3)), everybody), in_turn(pair, everybody),
        in_turn(come(1, 3), everybody),
    ) == [["", ""], [TEXT, ""], ["", ""], [TEXT, ""]]  # fmt: skip


def test_a_rank_that_does_not_know_who_waits_for_it_hears_that_from_them() -> None:
    everybody = come(0, 1, 2)
    found = together(in_turn(come(0, 1), everybody), in_turn(fail(0, 2), everybody), everybody)
    assert found == [[TEXT, ""], [TEXT, ""], ""]


def test_ranks_that_fail_alike_need_not_be_told_who_does() -> None:
    assert together(fail(0, 1), fail(0, 1)) == ["", ""]
    other = fail(0, 1, error=("UsageError", "", "not in the mesh"))
    assert together(other, fail(0, 1)) == ["UsageError: not in the mesh", TEXT]


@pytest.mark.parametrize("third", [False, True])
def test_ranks_that_name_different_ranks_are_told(third: bool) -> None:
    store = dist.HashStore()
    found = together(come(0, 1, 2), come(0, 1), *[come(0, 1, 2)] * third, store=store)
    text = (
        "UsageError: ranks build a model together, rank 0 with ranks 0, 1 and 2 and rank 1 with ranks 0 and 1: group="
    )
    assert len(set(found)) == 1 and found[0].startswith(text), found
    if third:
        assert together(*[come(0, 1, 2)] * 3, store=store) == [""] * 3
