"""Durable steps of several ranks: after a death all of them resume from one step, with the bits of a run without it."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.durable_programs import Death, Told, begin, commit_again, commit_in_join, lose_a_write, train
from tests.support.rank_processes import SOON_S, run_ranks, values_of

STEPS = 9


def durable(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {**config, "durability": {"every": 1, "path": str(folder)}}


def committed_by(told: list[Told]) -> int:
    """How many commits have returned on every rank that says so."""
    return min(len(one.losses) - 1 + (one.first or 0) for one in told)


@pytest.mark.parametrize("precision", ["bf16"])
def test_deaths(precision: str, tmp_path: Path) -> None:
    config = {"host_budget": "1400KiB", "nvme_budget": "64MiB", "precision": precision}
    undisturbed = durable(config, tmp_path / "undisturbed")
    expected: list[Told] = values_of(partial(train, forgets=True), 2, undisturbed, STEPS)
    assert all(one.error == "" and one.first == 0 and len(one.losses) == STEPS for one in expected)
    assert values_of(train, 2, undisturbed, STEPS) == [Told(STEPS, {}, one.end) for one in expected]
    ours, stood = durable(config, tmp_path / "killed"), 0
    deaths = [Death(1, "publishing", 1), Death(1, "backward", 3), Death(0, "publishing", 2), Death(1, "published", 1)]
    deaths.append(Death(1, "resuming", 1))
    for death in (*deaths, None):
        ended = run_ranks(train, 2, ours, STEPS, death, rank_0_has_store=True)  # and may die with it
        told = [one.value for one in ended if one.value is not None]
        for rank, one in enumerate(ended):
            if death is not None and rank == death.rank:
                assert one.exit_code == -signal.SIGKILL, one
                continue
            assert one.error is None and one.seconds < SOON_S, one
            assert (f"rank {death.rank}" in one.value.error) if death is not None else one.value.error == "", one
            if one.value.first is not None:
                assert one.value.first >= stood
                losses = expected[rank].losses
                assert one.value.losses == {step: losses[step] for step in one.value.losses}
        if told and told[0].first is not None:
            stood = max(stood, committed_by(told) - 1)
    assert stood >= 4
    assert [one.value.end for one in ended] == [one.end for one in expected]
    (alone,) = values_of(begin, 1, ours)
    assert "is that of rank 0 of 2, and this process is rank 0 of 1" in alone and "state.load(directory)" in alone
    for text in values_of(begin, 3, ours):
        assert "of 2, and this process is rank" in text and "Start 2 again" in text


def test_a_write_that_fails_on_one_rank_is_no_step_on_any(tmp_path: Path) -> None:
    config = durable({"host_budget": "32MiB"}, tmp_path / "state")
    first, second = values_of(lose_a_write, 2, config)
    assert [text[:5] for text in first] == ["1: No", "2: 1", "3: Ra", "4: 4", "RankE", "5: No"], first
    assert "rank 1 has failed at TrainingState.commit" in first[2] and "/somewhere" in second[2]
    assert "rank 1 has failed at TrainingState.discard" in first[4] and "/somewhere" in second[4]
    assert second[5] == "5: 4"  # there it was not given up
    for text in values_of(begin, 2, config):
        assert text == "resumed after 5"


def test_a_commit_that_one_rank_refuses_leaves_the_one_before_to_all(tmp_path: Path) -> None:
    config = durable({"host_budget": "32MiB"}, tmp_path / "state")
    for said in values_of(commit_again, 2, config):
        assert [text[:4] for text in said] == ["1: N", "2: U", "3: 2", "4: 3"], said
    for text in values_of(begin, 2, config):
        assert text == "resumed after 4"


def test_a_rank_without_batches_commits_with_the_others(tmp_path: Path) -> None:
    config = durable({"host_budget": "32MiB"}, tmp_path / "state")
    trained = values_of(commit_in_join, 2, config, (1, 3))
    assert [first for first, _ in trained] == [0, 0]
    resumed = values_of(commit_in_join, 2, config, (0, 0))
    assert resumed == [(3, end) for _, end in trained]
