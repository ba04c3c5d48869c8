"""Several ranks save and load a whole training state: the files of one process, for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepoffload.checkpoint.convert.commands import run as checkpoint_command
from tests.ranks.state_saving import (
    FIRST,
    die_while_saving,
    engine_load,
    engine_save,
    load,
    other_tasks_while_a_save_goes_on,
    save,
    save_between_backward_and_step,
    save_twice_where_one_fails,
    save_while_another_waits,
)
from tests.support.rank_processes import run_ranks, values_of, values_of_each

TAG = f"global_step{FIRST}"


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The files with weights and optimizer state."""
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors" and path.name != "training.safetensors"]
    return {path.name: path.read_bytes() for path in files}


def training_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "training.json").read_bytes())
    return values


def settings(precision: str, tmp_path: Path, *, tight: bool) -> dict[str, Any]:
    (tmp_path / "swap").mkdir(exist_ok=True)
    little = {"host_budget": "1500KiB", "nvme_budget": "64MiB", "nvme_path": str(tmp_path / "swap")}
    return {"precision": precision, **(little if tight else {"host_budget": "48MiB"})}


CASES = [
    ("gpt", "adamw", "fp16", True, False),
    ("gpt", "8-bit", "bf16", True, True),
    ("turned", "amsgrad", "bf16", False, False),
    ("mixtral", "lion", "bf16", False, True),
]


def test_two_ranks_save_and_load_as_one(tmp_path: Path):
    def calls(number: int, ranks: int = 2, *, saves: bool) -> list[Any]:
        """Each case in a separate folder; ``number``: of the ranks that have saved it, or save."""
        return [
            (model, name, settings(precision, tmp_path, tight=tight and ranks > 1))
            + (str(tmp_path / f"{model} {name}" / str(number)), *([wait] if saves else []))
            for model, name, precision, tight, wait in CASES
        ]

    alone = values_of_each(save, 1, calls(1, 1, saves=True))
    saved = values_of_each(save, 2, calls(2, saves=True))
    both = values_of_each(load, 2, [*calls(2, saves=False), *calls(1, saves=False)])
    loaded, loaded_of_one = both[: len(CASES)], both[len(CASES) :]
    for number, (model, name, *_) in enumerate(CASES):
        ((shown, drawn),) = alone[number]
        assert [by_rank for by_rank, _ in saved[number]] == [shown, shown]
        check_files(tmp_path / f"{model} {name}")
        assert drawn == saved[number][0][1]
        assert loaded[number] == saved[number]
        assert [by_rank for by_rank, _ in loaded_of_one[number]] == [shown, shown]


def check_files(folder: Path) -> None:
    """One rank and two have saved the same."""
    one, two = folder / "1" / TAG, folder / "2" / TAG
    assert tensors_of(one) == tensors_of(two)
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
    assert [path.name for path in (folder / "2").iterdir() if path.name.startswith(".")] == []
    first, both = training_of(one), training_of(two)
    assert len(both.pop("random_of_other_ranks")) == 1
    assert {**both, "random": None} == {**first, "random": None}
    assert checkpoint_command(["verify", str(folder / "2")]) == 0


def test_other_numbers_of_ranks_and_other_precisions(tmp_path: Path):
    """Three parts of a mean have other bits than one: what was loaded is compared. Others have other masters."""
    config = settings("bf16", tmp_path, tight=False)
    saved_by = {n: values_of(save, n, "gpt", "adamw", config, str(tmp_path / str(n)), True) for n in (3, 2)}
    calls = [("gpt", "adamw", config, str(tmp_path / str(number))) for number in saved_by]
    for (number, saved), loaded in zip(saved_by.items(), values_of_each(load, 4, calls), strict=True):
        assert [shown[:2] for shown, _ in loaded] == [saved[0][0][:2]] * 4
        assert [drawn for _, drawn in loaded[:number]] == [drawn for _, drawn in saved]
        assert len({drawn for _, drawn in loaded}) == 4  # those that did not save keep their own
    other = {**config, "precision": "fp32"}
    ((alone, _),) = values_of(load, 1, "gpt", "adamw", other, str(tmp_path / "2"))
    assert [shown for shown, _ in values_of(load, 2, "gpt", "adamw", other, str(tmp_path / "2"))] == [alone, alone]


def test_what_fails_on_one_rank_is_raised_on_all_and_training_goes_on(tmp_path: Path):
    first, second = values_of(save_twice_where_one_fails, 2, str(tmp_path))
    assert second[0].startswith("UsageError: ")
    assert "'/'" in second[0]
    assert first[0] == f"UsageError: rank 1 has failed at TrainingState.save: {second[0].removeprefix('UsageError: ')}"
    assert "rank 1 is at TrainingState.load, and rank 0 at TrainingState.save" in first[1]
    assert "rank 0 is at TrainingState.save, and rank 1 at TrainingState.load" in second[1]
    assert "there is no checkpoint 'nothing'" in first[2] and "there is no checkpoint 'nothing'" in second[2]
    for call, arguments in enumerate(
        [
            f"TrainingState.save with directory='{tmp_path}' on rank 0, directory='{tmp_path} of rank 1' on rank 1",
            "ranks give different tags for one checkpoint: 'one' on rank 0, 'another' on rank 1",
            "TrainingState.save with wait=True on rank 0, wait=False on rank 1",
            "TrainingState.load with load_optimizer_states=True on rank 0, load_optimizer_states=False on rank 1",
            f"save_pretrained with directory='{tmp_path}' on rank 0, directory='{tmp_path} of rank 1' on rank 1",
        ],
        3,
    ):
        assert first[call] == second[call] and first[call].startswith("UsageError: "), (first[call], second[call])
        assert arguments in first[call], first[call]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step2", "latest"]


def test_gradients_that_wait_are_an_error_on_all_ranks(tmp_path: Path):
    for said in values_of(save_between_backward_and_step, 2, str(tmp_path)):
        assert "save between backward and step" in said
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_while_saving_leaves_the_checkpoints_before(tmp_path: Path):
    first, second = run_ranks(die_while_saving, 2, str(tmp_path))
    assert second.exit_code == -9
    assert "RankError" in first.value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    assert checkpoint_command(["verify", str(tmp_path)]) == 0


def test_ranks_do_other_things_together_while_a_save_goes_on(tmp_path: Path):
    assert values_of(other_tasks_while_a_save_goes_on, 2, str(tmp_path)) == ["global_step1"] * 2
    assert checkpoint_command(["verify", str(tmp_path)]) == 0


def test_a_rank_waits_for_a_save_while_another_waits_for_it(tmp_path: Path):
    assert values_of(save_while_another_waits, 2, str(tmp_path)) == [[f"global_step{step}" for step in (1, 2, 3)]] * 2


def test_engines_of_ranks_save_and_load(tmp_path: Path):
    ((alone, steps),) = values_of(engine_save, 1, str(tmp_path / "1"))
    assert values_of(engine_save, 2, str(tmp_path / "2")) == [(alone, steps)] * 2
    assert values_of(engine_load, 1, str(tmp_path / "2")) == [(alone, steps)]
    assert values_of(engine_load, 2, str(tmp_path / "1")) == [(alone, steps)] * 2
