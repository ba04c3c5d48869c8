"""A save replaces nothing but a checkpoint of ours, and says so before it writes a byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.tags import publish_tag
from deepoffload.errors import IoFailure, UsageError


@pytest.fixture
def state() -> deepoffload.TrainingState:
    model = nn.Linear(3, 2)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return deepoffload.TrainingState(model, optimizer)


def everything(directory: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        found[str(path.relative_to(directory))] = (
            f"link to {os.readlink(path)}" if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        )
    return found


def deepspeeds_own(directory: Path) -> None:
    folder = directory / "global_step3"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"theirs")
    (directory / "latest").write_text("global_step3")


def a_note_in_a_checkpoint(directory: Path) -> None:
    (directory / "global_step3" / "notes.txt").write_text("best so far")


def a_file(directory: Path) -> None:
    (directory / "global_step3").write_text("mine")


def a_link(directory: Path) -> None:
    (directory / "elsewhere").mkdir()
    (directory / "global_step3").symlink_to("elsewhere")


def latest_is_a_directory(directory: Path) -> None:
    (directory / "latest").mkdir()


@pytest.mark.parametrize("what", [deepspeeds_own, a_note_in_a_checkpoint, a_file, a_link, latest_is_a_directory])
def test_what_is_somebody_elses_stays(
    what: Callable[[Path], None], state: deepoffload.TrainingState, tmp_path: Path
) -> None:
    if what is a_note_in_a_checkpoint:
        state.save(str(tmp_path), tag="global_step3")
    what(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="move it away"):
        state.save(str(tmp_path), tag="global_step3")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("damage", ["manifest.json", "training.json", None])
def test_ours_is_replaced_damaged_or_not(damage: str | None, state: deepoffload.TrainingState, tmp_path: Path) -> None:
    state.save(str(tmp_path), tag="t")
    if damage is not None:
        (tmp_path / "t" / damage).write_text("{")
    state.save(str(tmp_path), tag="t")
    state.load(str(tmp_path))


def test_an_empty_folder_is_taken(state: deepoffload.TrainingState, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    state.save(str(tmp_path), tag="t")
    state.load(str(tmp_path), tag="t")


def test_latest_that_is_a_directory_is_told(state: deepoffload.TrainingState, tmp_path: Path) -> None:
    state.save(str(tmp_path), tag="t")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(UsageError, match="is no file; name the tag"):
        state.load(str(tmp_path))


def test_a_failure_to_name_the_newest_says_that_the_checkpoint_is_complete(tmp_path: Path) -> None:
    staged = tmp_path / "staging" / "new"
    staged.mkdir(parents=True)
    (staged / "manifest.json").write_text("{}")
    (tmp_path / "staging" / "latest").mkdir()  # in the way of the file that becomes ``latest``
    with pytest.raises(IoFailure, match=r"The checkpoint is complete in .*/t; load it by its tag"):
        publish_tag(str(staged), str(tmp_path), "t", update_latest=True)
    assert (tmp_path / "t" / "manifest.json").exists()
