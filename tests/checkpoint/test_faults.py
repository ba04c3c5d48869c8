"""Disks that fail while a paged model is saved or loaded: the engine's injecting backend under real files."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint import saving, source
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.engine import IoEngine
from tests.checkpoint.training import ALL, adamw, gpt, snapshot, steps
from tests.support.loops import assert_same_bits
from tests.support.models import TinyGPT
from tests.support.paging import TIGHT, Paging

Contents = dict[str, bytes]
larger = partial(TinyGPT, width=128, depth=2)
"""Some of its blocks are read when loading has begun to change the model."""


def contents(directory: Path) -> Contents:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def trained(paging: Paging, build: Callable[[], nn.Module] = gpt) -> tuple[nn.Module, Any, deepoffload.TrainingState]:
    model = paging.build(build, TIGHT)
    optimizer = adamw(model)
    state = deepoffload.TrainingState(model, optimizer)
    torch.manual_seed(1)
    steps(model, optimizer, 0, 1)
    return model, optimizer, state


@pytest.mark.parametrize("chunk", (1, 2, 3, 4) if ALL else (1, 3))
@pytest.mark.parametrize("kind", ["errno=5", "short=0"], ids=["EIO", "nothing_written"])
def test_a_write_that_fails(chunk: int, kind: str, paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    state.save(tmp_path, "one")
    before, expected = contents(tmp_path), snapshot(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script=f"op=write nth={chunk} {kind}"))
        with pytest.raises(IoFailure, match="EIO") as caught:
            state.save(tmp_path, "one")
    assert caught.value.errno == errno.EIO and ".safetensors" in caught.value.filename
    assert contents(tmp_path) == before
    assert_same_bits(expected, snapshot(model, optimizer))
    steps(model, optimizer, 1, 1)
    state.save(tmp_path, "one")
    expected = snapshot(model, optimizer)
    steps(model, optimizer, 2, 1)
    state.load(tmp_path)
    assert_same_bits(expected, snapshot(model, optimizer))


def test_transfers_that_stop_short_are_continued(paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging, partial(TinyGPT, width=64, depth=4))
    expected = snapshot(model, optimizer)
    short = partial(IoEngine, fault_script="permille=700 seed=3 short=5000")
    state.save(tmp_path, "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", short)
        patch.setattr(source, "IoEngine", short)
        state.save(tmp_path, "short")
        for name, data in contents(tmp_path / "whole").items():
            if name.endswith(".safetensors"):
                assert data == (tmp_path / "short" / name).read_bytes(), name
        steps(model, optimizer, 1, 1)
        state.load(tmp_path, "short")
    assert_same_bits(expected, snapshot(model, optimizer))


@pytest.mark.parametrize(
    ("rule", "message"), [("errno=5", "EIO"), ("short=0", "ENODATA"), ("flip=77", "damaged between offset")]
)
def test_a_read_that_fails(rule: str, message: str, paging: Paging, tmp_path: Path) -> None:
    """Whichever it is: the first ones leave everything as it is, the others a model that refuses to be used."""
    model, optimizer, state = trained(paging, larger)
    path = state.save(tmp_path)
    saved = snapshot(model, optimizer)
    steps(model, optimizer, 1, 1)
    whole = half = 0
    for chunk in range(1, 200, 1 if ALL else 4):
        expected = snapshot(model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "IoEngine", partial(IoEngine, fault_script=f"op=read nth={chunk} {rule}"))
            try:
                state.load(tmp_path)
                break
            except (IoFailure, UsageError) as error:
                assert message in str(error) and path in str(error)
        try:
            state.save(tmp_path / "other")
            assert_same_bits(expected, snapshot(model, optimizer))
            whole += 1
        except UsageError as error:
            assert "half loaded" in str(error)
            half += 1
            for use in (partial(steps, model, optimizer, 1, 1), optimizer.step):
                with pytest.raises(UsageError, match="half loaded"):
                    use()
            state.load(tmp_path)
            assert_same_bits(saved, snapshot(model, optimizer))
    assert whole and half
    assert_same_bits(saved, snapshot(model, optimizer))
    steps(model, optimizer, 1, 1)


@pytest.mark.parametrize("after_s", (0.0, 0.002, 0.01, 0.02, 0.04) if ALL else (0.0, 0.02))
def test_a_directory_that_is_removed_during_a_save(after_s: float, paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    directory = tmp_path / "checkpoints"
    expected = snapshot(model, optimizer)
    ended = threading.Event()

    def remove() -> None:
        while not (directory.exists() and any(directory.iterdir())) and not ended.is_set():
            time.sleep(0.0001)
        time.sleep(after_s)
        while not ended.is_set():
            shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.001)

    remover = threading.Thread(target=remove)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script="op=write delay_ms=60"))
        remover.start()
        try:
            with pytest.raises(IoFailure, match="ENOENT") as caught:
                state.save(directory)
        finally:
            ended.set()
            remover.join()
    assert str(directory) in caught.value.filename
    assert_same_bits(expected, snapshot(model, optimizer))
    state.save(directory)
    steps(model, optimizer, 1, 1)
    state.load(directory)
    assert_same_bits(expected, snapshot(model, optimizer))


def test_a_directory_that_cannot_take_a_staging_folder(paging: Paging, tmp_path: Path) -> None:
    """It goes between the check and the first folder."""
    model, optimizer, state = trained(paging)
    directory = tmp_path / "checkpoints"
    prepare = saving.prepare

    def removed_then(*args: Any) -> None:
        prepare(*args)
        directory.rmdir()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "prepare", removed_then)
        with pytest.raises(IoFailure, match="ENOENT") as caught:
            state.save(directory)
    assert str(directory) in caught.value.filename
    state.save(directory)
