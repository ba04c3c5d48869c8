"""Directories, tags, values and moments that are wrong: each error says what was wrong and what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.values import decode, encode
from deepoffload.errors import IoFailure, UnsupportedError, UsageError
from deepoffload.params.parameter import OffloadedParameter
from tests.checkpoint.damaged import nested, round_list
from tests.checkpoint.training import snapshot
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows
from tests.support.paging import RESIDENT, TIGHT, Paging, Setting


class Run:
    """A small model that has made a step."""

    def __init__(self, paging: Paging, setting: Setting = RESIDENT) -> None:
        with paging.context(setting, (64 << 20) if setting is RESIDENT else (1 << 20)):
            self.model = mlp()
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2)
        self.state = deepoffload.TrainingState(self.model, self.optimizer)
        self.model(rows()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def run(paging: Paging) -> Run:
    return Run(paging)


# -- tags and directories --------------------------------------------------------------------------------------------

TAGS: list[tuple[Any, str]] = [
    ("", "it is empty"),
    ("a/b", "it has a '/'"),
    ("/etc", "it has a '/'"),
    ("..", "it begins with '.'"),
    (".hidden", "it begins with '.'"),
    ("latest", "name of a file of a checkpoint"),
    ("a\0b", "cannot be printed"),
    ("a\nb", "cannot be printed"),
    ("\ud800", "cannot be printed"),
    (" ", "begins or ends with a blank"),
    ("step ", "begins or ends with a blank"),
    ("\u00e4" * 101, "takes 202 bytes, and 200 are possible"),
    (b"step", "it is of type bytes; a tag is text or a whole number"),
    (1.5, "it is of type float"),
    (True, "it is of type bool"),
]


def test_tags_that_are_none(run: Run, tmp_path: Path) -> None:
    for tag, problem in TAGS:
        for call in (run.state.save, run.state.load):
            with pytest.raises(UsageError, match="cannot be a tag.*" + re.escape(problem)):
                call(tmp_path / "out", tag)
    assert not (tmp_path / "out").exists()


def test_tags_of_other_kinds(run: Run, tmp_path: Path) -> None:
    """A number, and the longest."""
    tags: list[Any] = [7, "\u00e4" * 100]
    for tag in tags:
        run.state.save(tmp_path, tag)
        assert run.state.load(tmp_path).folder == str(tmp_path / str(tag))


def test_directories_that_are_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one would be the working directory."""
    monkeypatch.chdir(tmp_path)
    wrong: list[Any] = ["", b"", None, 3, "a\0b"]
    for call in (run.state.save, run.state.load):
        for directory in wrong:
            with pytest.raises(UsageError, match="is no directory: give a path"):
                call(directory)
    assert not list(tmp_path.iterdir())
    path: Any = os.fsencode(tmp_path / "out")
    run.state.save(path)
    assert run.state.load(path).folder == str(tmp_path / "out" / "global_step1")


def test_nothing_to_load_says_why(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UsageError, match="nothing to load in .*: that is no directory"):
            run.state.load(directory)
        with pytest.raises(UsageError, match=r"no checkpoint 'one' in .*\(that is no directory\)"):
            run.state.load(directory, "one")
    with pytest.raises(UsageError, match="it has no file 'latest'; name a tag"):
        run.state.load(tmp_path)


def test_the_folder_of_a_tag_in_place_of_its_directory(run: Run, tmp_path: Path) -> None:
    folder = run.state.save(tmp_path, "one")
    with pytest.raises(
        UsageError, match=f"is itself a checkpoint: give {tmp_path} as the directory, and 'one' as the t"
    ):
        run.state.load(folder)


def test_paths_that_are_long_or_lead_nowhere(run: Run, tmp_path: Path) -> None:
    deep = str(tmp_path) + "/x" * 1500
    assert run.state.load(os.path.dirname(run.state.save(deep, "one"))).folder == deep + "/one"
    subprocess.run(["rm", "-rf", tmp_path / "x"], check=True)  # Python's own goes down by recursion
    with pytest.raises(UsageError, match="bytes, and 3500 are possible"):
        run.state.save(str(tmp_path) + "/x" * 2000)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a link that leads nowhere"):
        run.state.save(tmp_path / "dangling")


def test_a_save_without_room_leaves_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where that is known before, nor where a write fails, nor those that were empty before."""
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(IoFailure, match=r"ENOSPC.*1000 B are free.*Nothing has been written"):
            run.state.save(tmp_path / "new" / "folder")
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for name in ("new", "empty"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(IoFailure, match="ENOSPC"):
                run.state.save(tmp_path / name / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not list((tmp_path / "empty").iterdir())
    run.state.save(tmp_path / "new" / "folder")


# -- arguments of the wrong kind ---------------------------------------------------------------------------------------

SWITCHES = ("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
NO_SWITCHES: list[Any] = ["no", "False", "", 0, 1, None, np.bool_(False), torch.tensor(True)]
NO_COUNTS: list[Any] = [0, -1, True, "3", 1.0, [1], 2**70 * 1.0]


def test_switches_and_counts_that_are_none(run: Run, tmp_path: Path) -> None:
    """Text such as "no" would count as true."""
    run.state.save(tmp_path, "one")
    before = snapshot(run.model, run.optimizer)
    for value in NO_SWITCHES:
        with pytest.raises(UsageError, match="wait has to be True or False, not "):
            run.state.save(tmp_path, "two", wait=value)
        with pytest.raises(UsageError, match="wait has to be True or False, not "):
            run.state.commit(wait=value)
        for name in SWITCHES:
            with pytest.raises(UsageError, match=f"{name} has to be True or False, not "):
                run.state.load(tmp_path, "one", **{name: value})
    for value in NO_COUNTS:
        with pytest.raises(UsageError, match="keep_last has to be a whole number of at least 1, not "):
            run.state.save(tmp_path, "two", keep_last=value)
    assert_same_bits(before, snapshot(run.model, run.optimizer))
    assert sorted(os.listdir(tmp_path)) == ["latest", "one"]


def test_times_to_wait_that_are_none(run: Run, tmp_path: Path) -> None:
    handle = run.state.save(tmp_path, "one", wait=False)
    wrong: list[Any] = ["1", -1, float("nan"), True, [1]]
    for value in wrong:
        with pytest.raises(UsageError, match="timeout has to be a number of seconds, or None, not "):
            handle.wait(value)
    assert handle.wait(60) == handle.wait(60.0) == handle.wait(float("inf")) == str(tmp_path / "one")


# -- values ----------------------------------------------------------------------------------------------------------


class Colour(IntEnum):
    RED = 1


class Number(int):
    """Looks like a number."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"client_state\['a'\]\[1\] is of type set,.*write list\(x\), or leave it out"),
        ({"a": Number(1)}, r"client_state\['a'\] is of type .*Number,.*write int\(x\)"),
        ({"a": np.datetime64("2026")}, r"client_state\['a'\] is of type numpy.datetime64,.*write x.item\(\)"),
        ({"a": np.array([{}])}, r"numpy.ndarray,.*write torch.from_numpy\(x\)"),
        ({"a": SimpleNamespace(lr=1)}, r"types.SimpleNamespace,.*write vars\(x\)"),
        ({"a": Namespace(lr={1})}, r"client_state\['a'\]\['lr'\] is of type set"),
        ({"a": Path("x")}, r"write str\(x\)"),
        ({"a": datetime.now(UTC)}, r"datetime.*write str\(x\)"),
        ({"a": torch.bfloat16}, r"write str\(x\)"),
        ({"a": torch.Size([2])}, r"write tuple\(x\)"),
        ({"a": defaultdict(int)}, r"write dict\(x\)"),
        ({"a": Colour.RED}, "write x.value"),
        ({"a": 1j}, r"write \(x.real, x.imag\)"),
        ({Number(1): 1}, "the key 1 of client_state"),
        ({"a": "\udc80"}, r"client_state\['a'\] holds '\\udc80', which is no character"),
        ({"\udc80": 1}, r"the key '\\udc80' of client_state holds"),
        ({"a": -(10**6000)}, r"client_state\['a'\] is an integer of 19932 bits"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": nn.Parameter(torch.ones(2))}, r"Parameter,.*write x.detach\(\).clone\(\)"),
        ({"a": print}, "builtin_function_or_method,.*write what rebuilds it"),
        (SimpleNamespace(lr=1), r"client_state is of type types.SimpleNamespace,.*write vars\(x\)"),
        ({"a" * 10_000: {1}}, r"^client_state\['a{60,80} \.\.\. a{60,80}'\] is of type set"),
        (
            nested(65),
            r"^client_state(\[0\])+\S* \.\.\. \S+ is a list inside of 64 other containers, and",
        ),
        (
            round_list(),
            r"a checkpoint holds values in at most 64: write it flatter, or leave it out \(does it contain itself\?\)",
        ),
    ],
)
def test_values_that_no_checkpoint_holds(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        encode(value, "client_state", {})


def test_values_as_deep_as_a_checkpoint_holds_come_back(run: Run, tmp_path: Path) -> None:
    run.state.save_as(tmp_path, "one", client_state=nested(63))
    assert run.state.load(tmp_path).client_state == nested(63)


def test_values_of_numpy_and_settings_come_back(run: Run, tmp_path: Path) -> None:
    np.random.seed(3)
    said = {
        "args": Namespace(lr=0.1, names=["a", "$"], best=np.float64(0.1), steps=np.int32(7), done=np.bool_(True)),
        "random": np.random.get_state(),
        "empty": np.zeros((2, 0), np.float16),
        "part": np.arange(12, dtype=">i2").reshape(3, 4)[:, ::2],
    }
    run.state.save_as(tmp_path, "one", client_state=said)
    said["part"] = said["part"].copy()
    found = run.state.load(tmp_path).client_state
    assert found["args"] == said["args"] and [type(one) for one in vars(found["args"]).values()] == [
        type(one) for one in vars(said["args"]).values()
    ]
    for name in ("empty", "part"):
        assert found[name].dtype == said[name].dtype and found[name].shape == said[name].shape
        assert np.array_equal(found[name], said[name]) and found[name].flags.writeable
    expected = np.random.rand(3)
    np.random.set_state(found["random"])
    assert np.array_equal(np.random.rand(3), expected)
    for wrong in ({"dtype": "O"}, {"dtype": ">i2", "shape": [5]}, {"dtype": ">i2", "shape": [2, "x"]}):
        array = {"$": "array", "dtype": ">i2", "shape": [2], "bytes": {"$": "tensor", "name": "x"}, **wrong}
        with pytest.raises(UsageError, match="is not a value that a checkpoint holds"):
            decode(array, "client_state", lambda name: torch.zeros(4, dtype=torch.uint8))


# -- modes -----------------------------------------------------------------------------------------------------------


@contextmanager
def other_default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "default device": lambda: torch.device("meta"),
    "default dtype": other_default_dtype,
}


def saved_and_loaded(make: Any, mode: AbstractContextManager[Any], directory: Path) -> list[Any]:
    """What a run with a step before and one after it has in the end."""
    torch.manual_seed(0)
    model = mlp(depth=2).bfloat16()
    optimizer = make(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state, best = deepoffload.TrainingState(model, optimizer, scheduler=schedule), torch.ones(2)

    def step() -> None:
        model(rows().bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    step()
    with mode:
        state.save_as(directory, "one", client_state={"best": best})
        loaded = state.load(directory)
    step()
    loaded.client_state["best"].add_(1)
    return [snapshot(model, optimizer), schedule.state_dict(), loaded.client_state]


@pytest.mark.parametrize("make", [deepoffload.CPUAdamW, torch.optim.AdamW], ids=["ours", "torch's"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_in_which_the_program_saves_and_loads(mode: str, make: Any, tmp_path: Path) -> None:
    """What comes of a load is the same, and training continues with it. Also for ordinary parameters."""
    expected = saved_and_loaded(make, nullcontext(), tmp_path)
    assert_same_bits(expected, saved_and_loaded(make, MODES[mode](), tmp_path))


# -- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [RESIDENT, TIGHT], ids=str)
def test_a_load_between_a_forward_and_its_backward(setting: Setting, paging: Paging, tmp_path: Path) -> None:
    """That backward raises, as after ``load_state_dict`` in plain PyTorch; what was loaded trains."""
    run = Run(paging, setting)
    run.state.save(tmp_path, "one")
    results = []
    for between in (False, True):
        run.model(rows()).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        loss = run.model(rows()).square().mean()
        run.state.load(tmp_path)
        if between:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            run.optimizer.zero_grad()
        del loss
        run.model(rows()).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        results.append(snapshot(run.model, run.optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize("setting", [RESIDENT, TIGHT], ids=str)
def test_calls_in_which_nothing_can_be_loaded(setting: Setting, paging: Paging, tmp_path: Path) -> None:
    """Between two layers, inside a backward, and while another thread is in a forward, which a save does not mind."""
    run = Run(paging, setting)
    run.state.save(tmp_path, "one")
    before = snapshot(run.model, run.optimizer)
    problems: list[str] = []

    def attempt(*_: object) -> None:
        for call in (run.state.load, run.state.save):
            try:
                call(tmp_path, "one")
            except UsageError as error:
                problems.append(str(error).partition(":")[0])

    handle = run.model[2].register_forward_hook(attempt)
    run.model(rows())
    handle.remove()
    assert problems == ["load inside a forward of the model", "save inside a forward of the model"]
    problems.clear()
    weight = run.model[2].weight
    assert type(weight) is OffloadedParameter
    handle = weight.register_hook(attempt)
    run.model(rows()).sum().backward()
    handle.remove()
    assert problems == [f"{what} inside a backward" for what in ("load", "save")]
    run.optimizer.zero_grad()
    problems.clear()
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert go_on.wait(200)

    handle = run.model[4].register_forward_hook(wait)
    thread = threading.Thread(target=run.model, args=(rows(),))
    thread.start()
    assert inside.wait(200)
    attempt()
    go_on.set()
    thread.join()
    handle.remove()
    assert problems == ["load while another thread is inside a forward of the model"]
    assert_same_bits(before, snapshot(run.model, run.optimizer))
    run.state.load(tmp_path)
