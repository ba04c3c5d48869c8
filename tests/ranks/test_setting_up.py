"""Engines of several ranks: set up together or not at all, ended together, with DeepSpeed's surface."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ranks import setting_up as programs
from tests.support.rank_processes import SOON_S, run_ranks, values_of


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("seed", r"UsageError: the checksum of the model's values differs between ranks: \S*0.weight is .*manual_seed"),
        (
            "width",
            r"UsageError: the model differs between ranks: 0.weight is float32\[32, 16\] .trained. on rank 0",
        ),
        (
            "budget",
            "ConfigError: the configuration differs between ranks: host_budget is 8388608 on rank 0 and 94",
        ),
    ],
)
def test_what_differs_is_refused_with_one_text(what: str, text: str, tmp_path: Path) -> None:
    (first, threads), (second, others) = values_of(programs.build_otherwise, 2, what, str(tmp_path))
    assert first == second
    assert re.match(text, first), first
    assert threads == others == 1


@pytest.mark.parametrize(
    ("what", "theirs", "others"),
    [
        (
            "path",
            "ConfigError: nvme_path: .*missing does not exist",
            "ConfigError: rank 1 has failed at the start of ",
        ),
        (
            "fail",
            "OSError: the weights of the encoder",
            "RankError: rank 1 has failed at building the model: OSErr",
        ),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(what: str, theirs: str, others: str, tmp_path: Path) -> None:
    (first, _), (second, _) = values_of(programs.build_otherwise, 2, what, str(tmp_path))
    assert re.match(others, first), first
    assert re.match(theirs, second), second


def test_what_differs_is_named_as_it_is_written(tmp_path: Path) -> None:
    start = "ConfigError: the configuration differs between ranks: "
    failed = "ConfigError: rank 1 has failed at "
    first, second = values_of(programs.build_what_cannot_be, 2, str(tmp_path))
    expected = [
        (start + "nvme_path is set on rank 0 and not set on rank 1",) * 2,
        (start + "zero_optimization.stage is not set on rank 0 and 2 on rank 1",) * 2,
        (start + "checkpoint.load_universal is false on rank 0 and true on rank 1",) * 2,
        (start + "scheduler is not set on rank 0, and scheduler.type is 'WarmupLR' on rank 1",) * 2,
        (start + "scheduler.type is 'WarmupLR' on rank 0, and scheduler is not set on rank 1",) * 2,
        (failed + "reading the configuration: host_budget = 'much'",) * 2,
        (failed + "initialize(): optimizer.params.lr = -1.0",) * 2,
    ]
    for (text, other), starts in zip(zip(first, second, strict=True), expected, strict=True):
        assert text.startswith(starts[0]) and other.startswith(starts[1]), (text, other)


@pytest.mark.parametrize(("budget", "nvme"), [("40KiB", False), ("8KiB", True)])
def test_a_refusal_names_the_budget_of_the_host(budget: str, nvme: bool, tmp_path: Path) -> None:
    said = {"nvme_path": str(tmp_path)} if nvme else {}
    program = partial(programs.raise_the_budget, budget, **said)
    (text, enough, losses), (other, same, _) = values_of(program, 2)
    assert f"that each of the 2 ranks of a host has of its {budget[:-3]}.0 KiB" in text
    assert (text, enough) == (other, same) and len(losses) == 2
    assert (
        enough is not None and f"to at least {enough} bytes ({enough // 2} for each of the 2 ranks of a host)" in text
    )


def test_what_is_short_while_a_model_is_built_names_the_budget_of_the_host(tmp_path: Path) -> None:
    for enough_bytes, texts in values_of(programs.build_with_what_is_named, 2, str(tmp_path)):
        assert enough_bytes and all(f"to {enough} bytes, which 2 ranks" in text for enough, text in texts), texts


def test_a_rank_may_have_its_model_for_itself() -> None:
    alone = values_of(programs.train_alone, 2)
    assert values_of(programs.train_for_itself, 2) == [(losses, 1) for losses in alone]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_more_on_one_rank_is_one_error_on_all(world_size: int) -> None:
    first, *others = values_of(programs.close_early, world_size)
    assert all(said == first for said in others), (first, others)
    closed = "rank 0 has closed its engine" if world_size == 2 else "ranks 0 and 1 have closed their engines"
    for text in first[:-1]:
        trains = f"rank {world_size - 1} is at its step number 3 (at "
        assert text.startswith(f"RankError: {closed} after 2 steps, but others train on: {trains}"), text


def test_what_is_closed_or_forgotten_leaves_nothing_and_the_end_of_the_process_closes_the_last() -> None:
    first, second = values_of(programs.leave_the_last_open, 2)
    assert first[1] == second[1], "what a rank sees of a model that another one has forgotten"
    for threads, _, losses in (first, second):
        assert len(set(threads)) == 1, f"{threads}: gloo's, of groups that something still refers to"
        assert len(losses) == 2


def test_an_error_that_closes_one_engine_reaches_the_others() -> None:
    first, second = (ended for ended in run_ranks(programs.fail_between_steps, 2))
    assert second.value == ("ValueError: the batch is empty",) * 2
    assert first.value[0].startswith("RankError: rank 1 has failed at"), first
    assert "its engine was closed by ValueError: the batch is empty" in first.value[0]
    assert first.value[1] == "ValueError: the batch is torn", "its own error is not replaced"
    assert first.seconds < SOON_S


def test_deepspeeds_surface() -> None:
    first, second = values_of(programs.be_an_engine, 2)
    for rank, facts in enumerate((first, second)):
        assert facts["sizes"] == (2, 2, 8, 2)
        assert facts["ranks"] == (rank, rank)
        assert facts["updates"] == 1 and facts["norm"] > 0
        assert "differs between ranks: adapter.weight is" in facts["late"]  # each rank draws other values
        assert facts["stats"]["rank"] == rank and facts["stats"]["world_size"] == 2
        assert facts["bytes"]
        said, *counted = facts["steps without backward"]
        assert said.startswith("UsageError: engine.step() without engine.backward(loss): no gradient"), said
        assert counted == [0, 1]
    assert first["norm"] == second["norm"]
    (warning,) = first["warned"]
    assert "Stream is an IterableDataset" in warning and "from torch.distributed.get_rank() on" in warning
    assert second["warned"] == []
    for epoch in range(2):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == list(range(12))
    assert first["seen"][0] != first["seen"][1]


@pytest.mark.parametrize("how", ["all", "first"])
def test_rank_0_saves_the_weights(how: str, tmp_path: Path) -> None:
    values_of(programs.save, 2, str(tmp_path / "model"), how)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "0.weight": (32, 16),
        "0.bias": (32,),
        "2.weight": (16, 32),
        "2.bias": (16,),
    }
    assert all(value.isfinite().all() for value in saved.values())


def test_a_forked_child_that_ends_says_nothing_for_its_rank() -> None:
    for status, losses in values_of(programs.fork_in_the_middle, 2):
        assert status == 7 and len(losses) == 2
