"""What several ranks save, and load: the files and the state of one process, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.saving import (
    load_on_one_rank_only,
    load_state,
    load_wrong_shards,
    read_while_others_train_on,
    save_again_after_rank_0_alone,
    save_files,
    save_state,
    save_where_it_fails,
)
from tests.support.rank_processes import run_ranks, values_of, values_of_each

BUDGET = {"host_budget": "32MiB"}


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


STATES = [
    ("adamw", "fp32", 2),
    ("adamw", "bf16", 2),
    ("adamw", "fp16", 2),
    ("amsgrad", "bf16", 2),
    ("8-bit", "bf16", 2),
    ("lion", "fp32", 2),
    ("sgd", "fp32", 2),
]
AT_FIRST = [("adamw", "bf16", 0), ("adamw", "fp16", 0)]
"""Before the first step a state has what completes the weights."""
BY_ONE = STATES[1:2] + STATES[4:5]
"""What one process loads of what two have saved; that this equals what one has saved is compared for all."""


def test_state_of_two_ranks_is_that_of_one_and_loads_with_any_number(tmp_path: Path):
    def calls(of: str, kinds: list[tuple[str, str, int]] = STATES) -> list[Any]:
        return [
            (name, {**BUDGET, "precision": precision}, str(tmp_path / f"{of} {name} {precision} {steps}"), steps)
            for name, precision, steps in kinds
        ]

    (tmp_path / "swap").mkdir()
    little = {"host_budget": "1500KiB", "nvme_budget": "64MiB", "nvme_path": str(tmp_path / "swap")}
    on_nvme = [("adamw", {**little, "precision": "bf16"}, str(tmp_path / "little"), 2)]
    everything = [*STATES, *AT_FIRST]
    alone = [of_rank for (of_rank,) in values_of_each(save_state, 1, calls("one", everything))]
    *saved, of_little = values_of_each(save_state, 2, [*calls("two", everything), *on_nvme])
    assert of_little == [alone[1]] * 2
    for kind, expected, found in zip(everything, alone, saved, strict=True):
        assert found == [expected] * 2, kind
    shards = [(*call, True) for call in calls("two", everything)]
    by_kind = dict(zip(everything, alone, strict=True))
    for world_size, kinds, loads in (
        (1, BY_ONE, calls("two", BY_ONE)),
        (2, [*STATES, *everything], [*calls("one"), *shards]),
    ):
        for kind, found in zip(kinds, values_of_each(load_state, world_size, loads), strict=True):
            assert found == [by_kind[kind]] * world_size, kind
    check_wrong_shards(shards[1][1], shards[1][2])
    assert values_of_each(load_state, 4, calls("two", STATES[1:2])) == [[alone[1]] * 4]
    # Three parts of a mean have other bits than one; so only what was loaded is compared.
    (of_three,) = values_of_each(load_state, 3, calls("two", STATES[1:2]))
    assert [shown for shown, _ in of_three] == [alone[1][0]] * 3


def check_wrong_shards(config: dict[str, Any], path: str) -> None:
    """Shards of another rank, of another number of ranks, and of another cut, are errors on all ranks."""
    first, second = values_of(load_wrong_shards, 2, config, path)
    assert "the loaded state is what rank 0 has saved, and this is rank 1: each rank loads its own" in second[0]
    assert first[0].startswith("UsageError: rank 1 has failed at loading optimizer state: the loaded state is what")
    for said in (first, second):
        assert "the loaded state has those from 5 to 9: the model was cut otherwise when it was saved" in said[1]
    ((alone, _),) = values_of(load_wrong_shards, 1, config, path)
    assert "is rank 0's part of 2, and one process trains now" in alone
    assert "Start 2, or save the whole state" in alone


@pytest.mark.parametrize("transport", ["group", "memory"])
def test_rank_0_reads_state_while_the_others_train_on(transport: str):
    ((alone),) = values_of(read_while_others_train_on, 1, BUDGET)
    first, second = values_of(read_while_others_train_on, 2, {**BUDGET, "ranks": {"transport": transport}})
    assert first == alone
    assert second == []


def test_a_load_that_one_rank_makes_alone_is_an_error_that_says_so(tmp_path: Path):
    first, second = run_ranks(load_on_one_rank_only, 2, BUDGET, tmp_path / "given up")
    assert "waited 6 s for rank 1 at loading optimizer state. Every rank has to call it" in first.value
    assert "Every rank has to call it" in second.value


def test_files_are_those_of_one_rank(tmp_path: Path):
    (alone,) = values_of(save_files, 1, BUDGET, str(tmp_path / "one"))
    assert values_of(save_files, 2, BUDGET, str(tmp_path / "two")) == [alone, alone]
    for way in ("all", "first", "transformers"):
        one, two = files_of(tmp_path / "one" / way), files_of(tmp_path / "two" / way)
        assert len([name for name in one if name.endswith(".safetensors")]) > 1
        assert one == two, way


def test_what_fails_on_rank_0_is_raised_on_all(tmp_path: Path):
    (tmp_path / "file").write_text("no directory")
    first, second = values_of(save_where_it_fails, 2, str(tmp_path / "file"))
    kind, text = first.split(": ", 1)
    assert second.startswith(f"{kind}: rank 0 has failed at save_pretrained:")
    assert text in second


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
def test_a_disk_that_fails_is_raised_on_all():
    first, second = values_of(save_where_it_fails, 2, "/dev/full/saved")
    assert "/dev/full" in first
    assert "rank 0 has failed" in second


def test_rank_0_may_save_alone_and_all_ranks_later(tmp_path: Path):
    assert values_of(save_again_after_rank_0_alone, 2, str(tmp_path / "saved")) == [[], []]
