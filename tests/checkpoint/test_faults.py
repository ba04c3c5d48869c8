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
from tests.support.waiting import Gate

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
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("errno=5", errno.EIO),
        ("short=0", errno.EIO),
        *([("errno=28", errno.ENOSPC), ("errno=122", errno.EDQUOT)] if ALL else []),
    ],
)
def test_a_write_that_fails(chunk: int, kind: str, code: int, paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    state.save(tmp_path, "one")
    before, expected = contents(tmp_path), snapshot(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script=f"op=write nth={chunk} {kind}"))
        with pytest.raises(IoFailure, match=errno.errorcode[code]) as caught:
            state.save(tmp_path, "one")
    assert caught.value.errno == code and ".safetensors" in caught.value.filename
    assert contents(tmp_path) == before
    assert_same_bits(expected, snapshot(model, optimizer))
    steps(model, optimizer, 1, 1)
    state.save(tmp_path, "one")
    expected = snapshot(model, optimizer)
    steps(model, optimizer, 2, 1)
    state.load(tmp_path)
    assert_same_bits(expected, snapshot(model, optimizer))


@pytest.mark.parametrize("rules", ["permille=700 seed=3 short=5000", "delay_ms=20", "jitter_us=20000 seed=5"])
def test_disks_that_are_slow_or_stop_short(rules: str, paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging, partial(TinyGPT, width=64, depth=4))
    expected = snapshot(model, optimizer)
    state.save(tmp_path, "whole")
    with pytest.MonkeyPatch.context() as patch:
        for module in (saving, source):
            patch.setattr(module, "IoEngine", partial(IoEngine, fault_script=rules))
        state.save(tmp_path, "other")
        for name, data in contents(tmp_path / "whole").items():
            if name.endswith(".safetensors"):
                assert data == (tmp_path / "other" / name).read_bytes(), name
        steps(model, optimizer, 1, 1)
        state.load(tmp_path, "other")
    assert_same_bits(expected, snapshot(model, optimizer))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("rule", "message"), [("errno=5", "EIO"), ("short=0", "ENODATA"), ("flip=77", "damaged between offset")]
)
def test_a_read_that_fails(rule: str, message: str, paging: Paging, tmp_path: Path) -> None:
    """The first ones leave everything as it is, the others a model that refuses to be used."""
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
    """Its writes end when it has been removed for the first time, and it is removed until the save ends."""
    model, optimizer, state = trained(paging)
    directory = tmp_path / "checkpoints"
    expected = snapshot(model, optimizer)
    ended, gate = threading.Event(), Gate()

    def remove() -> None:
        while not (directory.exists() and any(directory.iterdir())) and not ended.is_set():
            time.sleep(0.0001)
        time.sleep(after_s)
        while not ended.is_set():
            shutil.rmtree(directory, ignore_errors=True)
            gate.open()
            time.sleep(0.001)

    remover = threading.Thread(target=remove)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script=f"op=write {gate.word}"))
        remover.start()
        try:
            with pytest.raises(IoFailure, match="ENOENT") as caught:
                state.save(directory)
        finally:
            ended.set()
            remover.join()
    gate.close()
    assert str(directory) in caught.value.filename
    assert_same_bits(expected, snapshot(model, optimizer))
    state.save(directory)
    steps(model, optimizer, 1, 1)
    state.load(directory)
    assert_same_bits(expected, snapshot(model, optimizer))


@pytest.mark.parametrize("after_s", (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05) if ALL else (0.0, 0.02))
def test_a_directory_that_is_removed_during_a_load(after_s: float, paging: Paging, tmp_path: Path) -> None:
    """Files that are open stay readable, so all of it is loaded, or what is missing is named."""
    model, optimizer, state = trained(paging, larger)
    directory = tmp_path / "checkpoints"
    path, kept = state.save(directory), state.save(tmp_path / "kept")
    saved = snapshot(model, optimizer)
    steps(model, optimizer, 1, 1)
    before = snapshot(model, optimizer)
    remover = threading.Timer(after_s, shutil.rmtree, [directory])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "IoEngine", partial(IoEngine, fault_script="op=read delay_ms=10"))
        remover.start()
        try:
            state.load(directory)
            expected = saved
        except (IoFailure, UsageError) as error:
            assert path in str(error) or str(directory) in str(error)
            expected = before
        finally:
            remover.join()
    try:
        state.save(tmp_path / "after")
        assert_same_bits(expected, snapshot(model, optimizer))
    except UsageError as error:
        assert "half loaded" in str(error) and expected is before
    state.load(Path(kept).parent)
    assert_same_bits(saved, snapshot(model, optimizer))


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
