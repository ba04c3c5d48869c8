"""Arguments of the wrong kind, calls from inside a load, and saves that return at once, with DeepSpeed's names."""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepoffload
from deepoffload.checkpoint import saving
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.engine import IoEngine
from tests.checkpoint.background import Throttle, saving_threads
from tests.checkpoint.test_engine import engine_of, train
from tests.checkpoint.training import snapshot
from tests.support.loops import assert_same_bits
from tests.support.models import batch

DECOUPLED = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}


def test_arguments_of_the_wrong_kind_change_nothing(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path)
    train(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path), tag="one")
    before = [snapshot(engine.module, engine.optimizer), engine.global_steps]
    save, load, weights = engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (save, {"save_latest": "no"}, "save_latest has to be True or False, not 'no'"),
        (save, {"exclude_frozen_parameters": 0}, "exclude_frozen_parameters has to be True or False, not 0"),
        (save, {"client_state": [1]}, "client_state has to be a dict, or None, not a list"),
        (save, {"tag": ("a", 1)}, "of type tuple; a tag is text or a whole number"),
        (load, {"load_module_strict": "no"}, "load_module_strict has to be True or False, not 'no'"),
        (load, {"load_optimizer_states": None}, "load_optimizer_states has to be True or False, not None"),
        (load, {"load_lr_scheduler_states": 0}, "load_lr_scheduler_states has to be True or False, not 0"),
        (load, {"load_module_only": "true"}, "load_module_only has to be True or False, not 'true'"),
        (load, {"tag": True}, "of type bool; a tag is text or a whole number"),
        (load, {"custom_load_fn": "mine"}, "custom_load_fn is called as"),
        (weights, {"exclude_frozen_parameters": "no"}, "exclude_frozen_parameters has to be True or False, not 'no'"),
        (weights, {"save_filename": 3}, "save_filename has to be the name of a file, not 3"),
    ]
    for call, given, message in calls:
        with pytest.raises(UsageError, match=message):
            call(str(tmp_path), **given)
    assert_same_bits(before, [snapshot(engine.module, engine.optimizer), engine.global_steps])
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]
    engine.close()


def test_calls_from_inside_a_load_are_told_so(nvme_path: Path, tmp_path: Path) -> None:
    """Nobody else is to blame."""
    engine = engine_of(nvme_path)
    train(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    tokens = batch(0)
    inside = "inside of that load, from custom_load_fn, or from .*: make it when the load has returned"
    again = "inside a load of the same state, from custom_load_fn, or from .*: call it after that load"
    calls: dict[str, tuple[Any, str]] = {
        "forward": (lambda: engine(tokens), f"is being loaded, and this call comes from {inside}"),
        "step": (lambda: engine.optimizer.step(), f"is being loaded, and this call comes from {inside}"),
        "save": (lambda: engine.save_checkpoint(str(tmp_path)), f"^save {again}"),
        "load": (lambda: engine.load_checkpoint(str(tmp_path)), f"^load {again}"),
    }
    for call, message in calls.values():

        def custom(src: dict[str, Tensor], dst: torch.nn.Module, call: Any = call) -> None:
            call()

        with pytest.raises(UsageError, match=message):
            engine.load_checkpoint(str(tmp_path), custom_load_fn=custom)
        with pytest.raises(UsageError, match="half loaded: .* failed on its way .UsageError: .*load a checkpoint"):
            engine(tokens)

    def fails(src: dict[str, Tensor], dst: torch.nn.Module) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.load_checkpoint(str(tmp_path), custom_load_fn=fails)
    with pytest.raises(UsageError, match="half loaded: .* failed on its way .KeyError: 'mine'.; load a checkpoint"):
        engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))
    train(engine, 1, 1)
    engine.close()


def test_a_forward_in_another_thread_is_told_of_that_load(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path)
    train(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    problems: list[str] = []

    def forward() -> None:
        try:
            engine(batch(0))
        except UsageError as error:
            problems.append(str(error))

    def custom(src: dict[str, Tensor], dst: torch.nn.Module) -> None:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        dst.load_state_dict(src)

    engine.load_checkpoint(str(tmp_path), custom_load_fn=custom)
    assert len(problems) == 1 and problems[0].startswith("another thread is loading ")
    engine.close()


class SavesItself:
    """An object whose state asks for a save."""

    def __init__(self) -> None:
        self.state: Any = None
        self.directory = ""

    def state_dict(self) -> dict[str, Any]:
        if self.state is not None:
            self.state.save(self.directory)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_from_inside_a_save_is_told_so(tmp_path: Path) -> None:
    other = SavesItself()
    state = deepoffload.TrainingState(torch.nn.Linear(2, 2), mine=other)
    other.state, other.directory = state, str(tmp_path)
    with pytest.raises(UsageError, match="^save inside a save of the same state, from .*: call it after that save"):
        state.save(tmp_path)
    assert not os.listdir(tmp_path)


def test_decoupled_saves_return_at_once(nvme_path: Path, tmp_path: Path) -> None:
    """They hold the step of the call, with all that comes after it."""
    first, second = engine_of(nvme_path, **DECOUPLED), engine_of(nvme_path, seed=1)
    train(first, 0, 2)
    expected = snapshot(first.module, first.optimizer)
    with Throttle().in_force():
        assert first.save_checkpoint(str(tmp_path), client_state={"epoch": 3}) is True
        assert saving_threads() and not (tmp_path / "latest").exists()
        train(first, 2, 1)
        assert first.save_checkpoint(str(tmp_path)) is True
        after = [train(first, 3, 1), snapshot(first.module, first.optimizer)]
        first.close()  # the last one is complete then
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert second.load_checkpoint(str(tmp_path), tag="global_step2")[1] == {"epoch": 3}
    assert_same_bits(expected, snapshot(second.module, second.optimizer))
    second.load_checkpoint(str(tmp_path))
    assert_same_bits(after, [train(second, 3, 1), snapshot(second.module, second.optimizer)])
    second.close()


def test_the_error_of_a_decoupled_save_is_raised_by_the_next(nvme_path: Path, tmp_path: Path) -> None:
    engine = engine_of(nvme_path, **DECOUPLED)
    train(engine, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script=f"op=write nth=1 errno={errno.EIO}"))
        assert engine.save_checkpoint(str(tmp_path)) is True
        train(engine, 1, 1)
        with pytest.raises(IoFailure, match="EIO"):
            engine.save_checkpoint(str(tmp_path))
    assert not os.listdir(tmp_path)
    engine.save_checkpoint(str(tmp_path))
    engine.close()
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "latest"]
