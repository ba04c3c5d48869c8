"""Adapters, a new head and parameters that are unfrozen while several ranks train: the bits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import late_programs as programs
from tests.support.rank_processes import SOON_S, run_ranks, values_of


@pytest.mark.parametrize(("precision", "transport", "micro_batches"), [("fp32", "memory", 1), ("bf16", "group", 2)])
def test_a_model_that_changes(precision: str, transport: str, micro_batches: int, tmp_path: Path) -> None:
    alone = {"host_budget": "256MiB", "gradient_dtype": "fp32", "precision": precision}
    (expected,) = values_of(programs.train, 1, alone, None, micro_batches)
    config = {"host_budget": "64MiB", "precision": precision, "ranks": {"transport": transport}}
    if transport == "group":
        config = {**config, "host_budget": "2MiB", "nvme_budget": "64MiB"}
    for rank, got in enumerate(values_of(programs.train, 2, config, str(tmp_path), micro_batches)):
        assert got.losses == expected.losses[rank::2], f"losses of rank {rank}"
        assert got.norms == expected.norms
        assert got.weights == expected.weights
        assert got.first_gradients == expected.first_gradients and expected.first_gradients


def test_what_cannot_be_taken_in_is_an_error_and_nothing_is_lost() -> None:
    texts = values_of(programs.differ, 2, "values")
    for first, second, third, large, small in texts:
        assert large.startswith("BudgetError: ") and small == ""
        assert first.startswith("UsageError: what came after the model was placed differs between ranks: blocks.1.")
        assert "down.weight is float32" in first and (second, third) == ("", "")


def test_what_one_rank_has_no_room_for_is_taken_in_later_by_all() -> None:
    found = values_of(programs.lack_room_once, 2)
    for error, losses in found:
        assert "a view takes the room" in error and losses == found[0][1] and losses[2] < losses[0]
    assert "rank 1 cannot take in" in found[0][0]


@pytest.mark.parametrize("how", ["one adds", "one unfreezes"])
def test_ranks_that_change_their_models_otherwise_are_told(how: str) -> None:
    ended = run_ranks(programs.differ, 2, how)
    for one in ended:
        assert one.seconds < SOON_S, one
        (text,) = one.value
        what = "parameters that came after the model was placed" if how == "one adds" else "blocks."
        assert what in text and text.startswith(("RankError: ", "UnsupportedError: ", "UsageError: ")), text
