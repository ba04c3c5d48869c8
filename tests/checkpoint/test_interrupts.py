"""Ctrl-C is heard in the middle of a save and of a load, which may take minutes; it does not wait for their end."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepoffload
from tests.checkpoint.background import mlp, train
from tests.checkpoint.training import adamw
from tests.runtime.lifecycle_program import interrupted_at
from tests.support.paging import TIGHT, Paging


def frames_of_interrupt(call: Callable[[], Any], within: str) -> list[str]:
    """The functions that Ctrl-C ends in the middle of ``within``."""
    with interrupted_at(-1, within) as places:
        call()
    left = len(places)
    while left > 1:
        left //= 2  # a second run may have fewer waits for the disk
        try:
            with interrupted_at(left, within):
                call()
        except KeyboardInterrupt as interrupt:
            return [frame.name for frame in traceback.extract_tb(interrupt.__traceback__)]
    raise AssertionError(f"no interrupt was heard within {within}: {places}")


@pytest.mark.parametrize(
    ("what", "within"), [("save_pretrained", "write_file"), ("save", "run"), ("load", "_load_pieces")]
)
def test_ctrl_c_is_heard_in_the_middle(paging: Paging, tmp_path: Path, what: str, within: str) -> None:
    model = paging.build(mlp, TIGHT, key="mlp")
    optimizer = adamw(model)
    state = deepoffload.TrainingState(model, optimizer)
    train(model, optimizer, 0)
    state.save(tmp_path, tag="first")
    calls: dict[str, Callable[[], Any]] = {
        "save_pretrained": lambda: deepoffload.save_pretrained(model, tmp_path / "weights"),
        "save": lambda: state.save(tmp_path, tag="second"),
        "load": lambda: state.load(tmp_path, tag="first"),
    }
    frames = frames_of_interrupt(calls[what], within)
    assert within in frames, frames
    state.load(tmp_path, tag="first")
    train(model, optimizer, 0)
