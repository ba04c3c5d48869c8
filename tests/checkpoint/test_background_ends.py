"""How saves without waiting end: errors, further saves, loads, the end of the engine, of the process, of a child."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint import copying, saving
from deepoffload.checkpoint.manifest import read_manifest
from deepoffload.errors import ClosedError, IoFailure, IoTimeout
from deepoffload.io.engine import IoEngine
from tests.checkpoint.background import Throttle, contents, mlp, saving_threads, train
from tests.checkpoint.training import adamw, snapshot
from tests.support.inspect import engine_of_param
from tests.support.loops import assert_same_bits
from tests.support.paging import RESIDENT, TIGHT, Paging, Setting, plain
from tests.support.programs import Programs


def trained(paging: Paging, setting: Setting = TIGHT) -> tuple[nn.Module, Any, deepoffload.TrainingState]:
    model = paging.build(mlp, setting, key="mlp")
    optimizer = adamw(model)
    state = deepoffload.TrainingState(model, optimizer)
    for number in range(2):
        train(model, optimizer, number)
    return model, optimizer, state


def test_the_call_moves_nothing_and_gives_a_handle(paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    train(model, optimizer, 2)
    throttle = Throttle()
    with throttle.in_force():
        before = deepoffload.stats(model)
        handle = state.save(tmp_path, wait=False)
        after = deepoffload.stats(model)
        assert not isinstance(handle, str) and (handle.folder, handle.step) == (str(tmp_path / "global_step3"), 3)
        assert not handle.done() and handle.error is None and "under way" in repr(handle)
        assert [thread.name for thread in saving_threads()] == ["deepoffload-save"]
        for counter in ("disk_bytes_read", "disk_bytes_written", "evictions", "faults"):
            assert before[counter] == after[counter], counter
        assert not (tmp_path / "global_step3").exists()
        train(model, optimizer, 3)
        assert handle.wait() == handle.folder and handle.done() and "done" in repr(handle)
    assert not saving_threads() and read_manifest(handle.folder).step == 3
    assert isinstance(state.save(tmp_path), str)


def test_a_wait_that_is_too_short_leaves_the_save_alone(paging: Paging, tmp_path: Path) -> None:
    _, _, state = trained(paging)
    with Throttle().in_force():
        handle = state.save(tmp_path, wait=False)
        assert not isinstance(handle, str)
        with pytest.raises(IoTimeout, match="has not ended after 0 s; it continues"):
            handle.wait(0)
        assert read_manifest(handle.wait(60)).step == 2


def test_a_second_save_and_a_load_wait_for_the_first(paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    with Throttle().in_force():
        first = state.save(tmp_path, wait=False, keep_last=1)
        train(model, optimizer, 2)
        second = state.save(tmp_path, wait=False, keep_last=1)
        assert first.done() and not second.done() and len(saving_threads()) == 1  # type: ignore[union-attr]
        expected = snapshot(model, optimizer)
        train(model, optimizer, 3)
        assert state.load(tmp_path).step == 3 and second.done()  # type: ignore[union-attr]
        assert_same_bits(expected, snapshot(model, optimizer))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "latest"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("setting", [TIGHT, RESIDENT], ids=str)
def test_an_error_is_told_and_training_continues(
    code: int, setting: Setting, paging: Paging, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, state = trained(paging, setting)
    state.save(tmp_path, "one")
    before = contents(tmp_path / "one")
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR, "deepoffload"):
        patch.setattr(saving, "IoEngine", partial(IoEngine, fault_script=f"op=write nth=1 errno={code}"))
        patch.setattr(copying, "IDLE_S", 0.02)  # else each of 14 updates is waited for
        handle = state.save(tmp_path, "one", wait=False)
        losses = [train(model, optimizer, number) for number in (2, 3)]
        assert not isinstance(handle, str)
        for _ in range(2):
            with pytest.raises(IoFailure) as caught:
                handle.wait()
        assert caught.value.errno == code and handle.error is caught.value and "failed" in repr(handle)
        state.save_as(tmp_path, "two", wait=False)
        for thread in saving_threads():
            thread.join()
        with pytest.raises(IoFailure, match=errno.errorcode[code]):  # nobody has asked the handle
            state.save(tmp_path, "three")
    assert caplog.text.count("in the background failed; earlier checkpoints are intact: ") == 2
    assert contents(tmp_path / "one") == before and sorted(os.listdir(tmp_path)) == ["latest", "one"]
    reference, other = plain(mlp), None
    other = adamw(reference)
    assert losses == [train(reference, other, number) for number in range(4)][2:]
    assert read_manifest(state.save(tmp_path, "three")).step == 4  # type: ignore[arg-type]
    assert_same_bits(snapshot(model, optimizer)["weights"], snapshot(reference, other)["weights"])


def test_swap_files_without_room_for_frozen_extents(paging: Paging, tmp_path: Path, nvme_path: Path) -> None:
    """The next write of a block waits until what it would write over is copied."""
    folders = []
    for wait in (True, False):
        throttle = Throttle()
        with throttle.in_force():
            with deepoffload.offload_context(
                host_budget="220KiB", nvme_path=str(nvme_path), nvme_budget="540KiB", debug={"evict_always": True}
            ) as context:
                torch.manual_seed(0)
                model = mlp()
            optimizer = adamw(model)
            state = deepoffload.TrainingState(model, optimizer)
            for number in range(5):
                train(model, optimizer, number)
                if number == 2:
                    state.save(tmp_path / str(wait), wait=wait)
                    room_bytes = int(540 * 1024 - context.engine.stats()["nvme_bytes"])
            assert not wait or room_bytes < 250 * 1024, "there was room for all"
            context.engine.close()
        folders.append(contents(tmp_path / str(wait) / "global_step3"))
    assert folders[0] == folders[1]


def test_closing_the_engine_finishes_the_save(paging: Paging, tmp_path: Path) -> None:
    model, _, state = trained(paging)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with Throttle().in_force():
        handle = state.save(tmp_path, wait=False)
        engine_of_param(next(model.parameters())).close()
        assert not saving_threads()
    assert handle.done() and read_manifest(handle.wait()).step == 2  # type: ignore[union-attr]
    again = plain(mlp, seed=9)
    deepoffload.TrainingState(again).load(tmp_path, load_module_only=True)
    assert_same_bits(expected, dict(again.state_dict()))


def test_a_handle_that_nobody_keeps(paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    with Throttle().in_force():
        state.save(tmp_path, wait=False)
        del state  # the save is of the model, which stays
        second = deepoffload.TrainingState(model, optimizer)
        train(model, optimizer, 2)
        assert second.save(tmp_path, "two")
    assert sorted(os.listdir(tmp_path)) == ["global_step2", "latest", "two"]


def test_from_another_thread_of_the_program(paging: Paging, tmp_path: Path) -> None:
    model, optimizer, state = trained(paging)
    with Throttle().in_force():
        handle = state.save(tmp_path, wait=False)
        worker = threading.Thread(target=train, args=(model, optimizer, 2))
        worker.start()
        worker.join()
        assert read_manifest(handle.wait()).step == 2  # type: ignore[union-attr]


# -- the end of the process ------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, os, signal, sys, threading, time
import torch
import deepoffload
from tests.checkpoint.background import mlp, train
from tests.checkpoint.training import adamw
from deepoffload.checkpoint import saving
from deepoffload.io.engine import IoEngine
from functools import partial

swap, directory, how = sys.argv[1:]
torch.set_num_threads(1)
with deepoffload.offload_context(host_budget="300KiB", nvme_path=swap) as context:
    model = mlp()
optimizer = adamw(model)
for number in range(3):
    train(model, optimizer, number)
slow = "op=write delay_ms=300"
if how in ("fork", "ctrl-c") or how.endswith("at the end"):
    looked_at, opened_by = os.pipe()
    slow = f"op=write gate={looked_at}"
saving.IoEngine = partial(IoEngine, fault_script=slow)
handle = deepoffload.TrainingState(model, optimizer).save(directory, wait=False)
if how == "fork":
    child = os.fork()
    if not child:
        try:
            handle.wait()
        except deepoffload.errors.ClosedError as error:
            print(error, flush=True)
        assert not handle.done()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert any(name.startswith(".deepoffload-save-") for name in os.listdir(directory)) and not handle.done()
    os.write(opened_by, b"x")
elif how == "error":
    raise RuntimeError("the program fails")
elif how == "ctrl-c":
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        handle.wait()
    except KeyboardInterrupt:
        print("interrupted", handle.done(), flush=True)
    os.write(opened_by, b"x")
else:
    def stop(number, frame):
        sys.exit(7)
    def interrupt(number):
        while not threading._SHUTTING_DOWN:
            time.sleep(0.01)
        time.sleep(0.1)
        for _ in range(2):  # torchrun sends a second one
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        os.write(opened_by, b"x")
    signal.signal(signal.SIGTERM, stop)
    number = {"ctrl-c at the end": signal.SIGINT, "sigterm at the end": signal.SIGTERM}.get(how)
    if number is not None:
        atexit.register(print, "the end")
        threading.Thread(target=interrupt, args=[number], daemon=True).start()
    else:  # a thread at the end is none that Python waits for
        atexit.register(lambda: threading.Thread(target=time.sleep, args=[1]).start())
    if how == "ctrl-c at the end":
        sys.exit(5)  # its status is not that of a process that Ctrl-C has ended
    if how == "sigterm at the end":
        threading.Thread(target=time.sleep, args=[1]).start()  # Python waits for it
"""


@pytest.mark.parametrize("how", ["end", "error", "fork", "ctrl-c", "ctrl-c at the end", "sigterm at the end"])
def test_the_end_of_the_process(how: str, programs: Programs, nvme_path: Path, tmp_path: Path) -> None:
    done = programs.run(PROGRAM, str(nvme_path), str(tmp_path), how, timeout_s=120)
    names = sorted(os.listdir(tmp_path))
    if not how.endswith("at the end"):
        assert names == ["global_step3", "latest"], done.stderr
        assert done.returncode == (how == "error"), done.stderr
    else:
        status, what = -signal.SIGINT, "Ctrl-C"
        if how == "sigterm at the end":
            status, what = 7, "stop, the handler of SIGTERM, has raised SystemExit"
        assert names == [] and done.returncode == status, done.stderr
        why = f"the end of the process waited for it, and was interrupted ({what})"
        assert done.stderr.endswith(f"failed; earlier checkpoints are intact: {why}\n"), done.stderr
        assert done.stdout == "the end\n"
    if "latest" in names:
        again = plain(mlp, seed=9)
        assert deepoffload.TrainingState(again, adamw(again)).load(tmp_path).step == 3
    if how == "fork":
        assert "a forked child cannot wait for it" in done.stdout
    if how == "ctrl-c":
        assert done.stdout == "interrupted False\n"
    assert list(nvme_path.iterdir()) == []


def test_a_child_waits_for_no_thread_of_its_parent(paging: Paging, tmp_path: Path) -> None:
    """There is none in it."""
    _, _, state = trained(paging)
    with Throttle().in_force():
        handle = state.save(tmp_path, wait=False)
        assert not isinstance(handle, str) and not handle.done()
        child = os.fork()
        if not child:
            started, refused = time.monotonic(), 0
            for call in (handle.wait, lambda: state.save(tmp_path), lambda: state.load(tmp_path)):
                try:
                    call()
                except ClosedError:
                    refused += 1
            os._exit(refused + 10 * (time.monotonic() - started > 20))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        handle.wait(60)


def test_an_error_of_a_child(paging: Paging, tmp_path: Path) -> None:
    """A handle knows its process."""
    _, _, state = trained(paging)
    handle = state.save(tmp_path, wait=False)
    assert not isinstance(handle, str)
    handle.wait()
    handle._process += 1
    with pytest.raises(ClosedError, match="the parent process's work"):
        handle.wait()
