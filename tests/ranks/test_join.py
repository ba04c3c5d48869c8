"""``deepoffload.join``: ranks with different numbers of batches, in real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.joining_programs import Uneven, do_wrong, expected, join_with_torch_optimizer, train_all, train_engine
from tests.support.rank_processes import SOON_S, run_ranks, values_of, values_of_each

MEMORY = {"host_budget": "64MiB"}
TWO_RANKS = {
    "some": Uneven(((2, 4),), config=MEMORY),
    "one has none": Uneven(((0, 3),), config=MEMORY),
    "again": Uneven(((3, 1), (0, 0), (1, 2)), config=MEMORY),
    "accumulating": Uneven(((3, 5), (2, 1)), every=2, config=MEMORY),
    "cleared late": Uneven(((1, 3), (2, 1)), clear_first=True, config=MEMORY),
    "schedule": Uneven(((1, 3), (2, 1)), schedule=True, config=MEMORY),
    "edited": Uneven(((0, 2), (2, 1)), edited=True, config=MEMORY),
    "two optimizers": Uneven(((1, 4), (3, 2)), turns=True, config=MEMORY),
    "disk": Uneven(
        ((2, 4), (2, 1)), config={"host_budget": "3MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True}}
    ),
    "in backward": Uneven(((1, 3), (2, 1)), schedule=True, clip=None, config={**MEMORY, "step_overlap": "in_backward"}),
    "at once": Uneven(((3, 1),), config={**MEMORY, "step_overlap": "none", "ranks": {"transport": "group"}}),
}


def check(runs: list[Uneven], ranks: int, path: Path) -> None:
    found = values_of(train_all, ranks, runs, str(path))
    for number, run in enumerate(runs):
        right, losses = expected(run)
        for rank in range(ranks):
            got, stats = found[rank][number]
            assert got.losses == losses[rank], f"losses of rank {rank} in {run}"
            assert got.norms == right.norms, f"norms of rank {rank} in {run}"
            assert got.weights == right.weights, f"weights of rank {rank} in {run}"
            assert got.gradients == right.gradients, f"gradients of rank {rank} in {run}"
            looked_at = {step: right.looked_at[step] for step in got.looked_at}
            assert got.looked_at == looked_at, f"gradients after steps of rank {rank} in {run}"
            assert stats["world_size"] == ranks


def test_two_ranks_with_different_numbers_of_batches_train_as_one_process(tmp_path: Path) -> None:
    check(list(TWO_RANKS.values()), 2, tmp_path)


def test_three_ranks_with_different_numbers_of_batches_train_as_one_process(tmp_path: Path) -> None:
    check([Uneven(((3, 5, 5),), config=MEMORY)], 3, tmp_path)


def test_one_rank_trains_as_without_it(tmp_path: Path) -> None:
    check([Uneven(((2,), (0,), (1,)), config=MEMORY)], 1, tmp_path)


LAST_AT_EDIT = "was last at edit of"
"""What is known of a rank that has told nobody, and has ended before the other one looks."""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raises", "the data loader has found a broken file"),
        ("keeps its gradients", "was kept.*call optimizer.zero_grad"),
        ("clips", f"was at edit of .*max_grad_norm there, not with torch's clip_grad_norm_|{LAST_AT_EDIT}"),
        ("edits", f"rank 1 was at edit of|has written .* on some ranks, while others have joined|{LAST_AT_EDIT}"),
        ("copies its optimizer", "optimizer number 1 of this model, which this rank lacks"),
    ],
)
def test_what_a_joined_rank_cannot_follow_is_an_error_on_all(what: str, text: str, tmp_path: Path) -> None:
    for ended in run_ranks(do_wrong, 2, what, str(tmp_path)):
        assert ended.error in ("RankError", "UsageError", "UnsupportedError", "ValueError"), ended.text
        last = ended.text[ended.text.rindex("Error: ") :]
        assert re.search(text, last), ended.text
        assert ended.seconds < SOON_S


def test_an_interrupt_of_a_joined_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    joined, other = run_ranks(do_wrong, 2, "interrupts", str(tmp_path))
    assert joined.error == "KeyboardInterrupt", joined.text
    assert other.error == "RankError", other.text
    assert "KeyboardInterrupt" in other.text
    assert max(joined.seconds, other.seconds) < SOON_S


def test_optimizers_of_torch_are_refused(tmp_path: Path) -> None:
    for ended in run_ranks(join_with_torch_optimizer, 2, str(tmp_path)):
        assert ended.error == "UnsupportedError", ended.text
        assert "torch's own cannot step" in ended.text


def test_an_engine_without_batches_counts_schedules_and_scales_with_the_others() -> None:
    precisions = ("fp32", "fp16")
    trained = values_of_each(train_engine, 2, [((1, 6), precision) for precision in precisions])
    for precision, (first, second) in zip(precisions, trained, strict=True):
        assert first["steps"] == second["steps"] == 6
        assert 0 < first["skipped"] < 6 if precision == "fp16" else first["skipped"] == 0
        for key in ("skipped", "scale", "lr", "norm"):
            assert first[key] == second[key], key
        assert first["weights"] == second["weights"]
