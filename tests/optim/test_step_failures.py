"""A disk error in the middle of an update: the program catches it, tries again, and has the bits of an undisturbed
run."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from tests.support.inspect import io_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import PACKAGE, SERIAL, Paging, plain

TRIED = 5
"""How many places in an update are made to fail, one after the other."""


def chunks_of(model: nn.Module) -> int:
    io = io_of(model)
    assert io is not None
    return io.stats()["chunks_done"]


def until_done(call: Callable[[], Any], retries: int) -> tuple[Any, int]:
    for failed in range(retries + 1):
        try:
            return call(), failed
        except IoFailure:
            if failed == retries:
                raise
    raise RuntimeError("unreachable")


def train(paging: Paging, overlap: str, retries: int = 0) -> tuple[Any, range, int]:
    """Weights and states after three steps, the chunks moved in the second update, and how often a call was repeated.

    An update is made by ``step()``, or, when it is deferred, by the forward that follows.
    """
    model = paging.build(mlp, replace(SERIAL, step_overlap=overlap), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    repeated = 0
    seen = []
    for seed in range(3):
        seen.append(chunks_of(model))
        output, failed = until_done(lambda seed=seed: model(rows(seed=seed)), retries)
        repeated += failed
        seen.append(chunks_of(model))
        output.square().mean().backward()
        seen.append(chunks_of(model))
        _, failed = until_done(optimizer.step, retries)
        repeated += failed
        optimizer.zero_grad()
    updates = range(seen[5] + 1, seen[6]) if overlap == "none" else range(seen[6] + 1, seen[7])
    io = io_of(model)
    assert io is not None and io.stats()["requests_failed"] == retries, "nothing has failed: this tested nothing"
    return (weights_of(model), optimizer.state_dict()["state"]), updates, repeated


@pytest.mark.parametrize("overlap", ["none", "deferred"])
def test_again_after_a_disk_error(paging: Paging, monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    expected, chunks, _ = train(paging, overlap)
    assert len(chunks) > TRIED
    raised = 0
    for place in range(TRIED):
        chunk = chunks[place * (len(chunks) - 1) // (TRIED - 1)]
        monkeypatch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={errno.EIO}"))
        got, _, repeated = train(paging, overlap, retries=1)
        raised += repeated
        assert_same_bits(expected, got)
    assert raised or overlap == "deferred", (
        "a write that fails may be made good by evicting something else, but not every failure is one"
    )


def test_an_update_inside_backward_that_fails_is_made_once(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_twice() -> tuple[list[int], bool]:
        """The chunks moved before and after the second backward, and whether that has failed."""
        model = paging.build(mlp, replace(SERIAL, step_overlap="in_backward"), key="mlp")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss, failed = model(rows(seed=1)).square().mean(), False
        chunks = [chunks_of(model)]
        try:
            loss.backward()
        except IoFailure:
            failed = True  # what has a gradient is updated; the others have none
        chunks.append(chunks_of(model))
        optimizer.step()
        steps = [int(state["step"]) for state in optimizer.state_dict()["state"].values()]
        assert set(steps) <= {1, 2}, steps
        assert failed or set(steps) == {2}
        return chunks, failed

    (first, last), _ = train_twice()
    raised = 0
    for chunk in range(first + 1, last, 9):
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={errno.EIO}"))
            raised += train_twice()[1]
    assert raised, "hardly anything has failed: this tested nothing"


@pytest.mark.parametrize("overlap", ["none", "deferred"])
@pytest.mark.parametrize(
    "wrong",
    [{"lr": math.nan}, {"eps": math.nan}, {"weight_decay": math.inf}, {"lr": "fast"}, {"betas": (0.9, "b")}],
    ids=str,
)
def test_a_setting_out_of_range_changes_nothing(paging: Paging, overlap: str, wrong: dict[str, Any]) -> None:
    """Also where the update would come later: the next forward must not meet it."""
    model = paging.build(mlp, replace(SERIAL, step_overlap=overlap), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    before = weights_of(model)
    model(rows()).square().mean().backward()
    right = {key: optimizer.param_groups[0][key] for key in wrong}
    optimizer.param_groups[0].update(wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimizer.step()
    assert_same_bits(before, weights_of(model))
    optimizer.param_groups[0].update(right)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def train_two(
    paging: Paging, monkeypatch: pytest.MonkeyPatch, overlap: str, fail_at: int | None
) -> tuple[Any, range, int]:
    """Two engines under one optimizer; a transfer of the one that is updated first fails. As :func:`train`."""
    script = {} if fail_at is None else {"fault_script": f"nth={fail_at} errno={errno.EIO}"}
    config = replace(SERIAL, step_overlap=overlap)
    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "IoEngine", partial(IoEngine, **script))
        first = paging.build(mlp, config, key="mlp")
    second = paging.build(mlp, config, key="mlp")
    optimizer = deepoffload.CPUAdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    repeated = 0
    seen = []
    for seed in range(3):
        for model in (first, second):
            output, failed = until_done(lambda seed=seed, model=model: model(rows(seed=seed)), int(fail_at is not None))
            _, more = until_done(output.square().mean().backward, 0)
            repeated += failed + more
        seen.append(chunks_of(first))
        _, failed = until_done(optimizer.step, int(fail_at is not None))
        repeated += failed
        seen.append(chunks_of(first))
        optimizer.zero_grad()
    result = weights_of(first), weights_of(second), optimizer.state_dict()["state"]
    return result, range(seen[2] + 1, seen[3]), repeated


def test_the_other_engine_makes_its_step_too(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after an engine whose disk fails must not be forgotten."""
    expected, chunks, _ = train_two(paging, monkeypatch, "none", None)
    raised = 0
    for place in range(TRIED):
        chunk = chunks[place * (len(chunks) - 1) // (TRIED - 1)]
        got, _, repeated = train_two(paging, monkeypatch, "none", chunk)
        raised += repeated
        assert_same_bits(expected, got)
    assert raised, "nothing has failed: this tested nothing"


class Interrupting:
    """Sends a real SIGINT, or another signal, at the ``line``-th line of deepoffload's Python that runs inside; none
    for 0."""

    def __init__(self, line: int, number: int = signal.SIGINT) -> None:
        self.lines, self._line, self._number = 0, line, number

    def __enter__(self) -> Interrupting:
        sys.settrace(self._enter_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._see_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _see_line(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines += event == "line"
        if self.lines == self._line:
            sys.settrace(None)
            os.kill(os.getpid(), self._number)
        return self._see_line


@pytest.mark.parametrize("overlap", ["none", "deferred"])
def test_interrupted_again_and_again(paging: Paging, overlap: str) -> None:
    """A step that resumes, and is interrupted once more anywhere in that, still is one step."""

    def begin() -> tuple[nn.Module, Any]:
        model = paging.build(mlp, replace(SERIAL, step_overlap=overlap), key="mlp")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        model(rows()).square().mean().backward()
        return model, optimizer

    def step(optimizer: Any, line: int) -> int:
        with Interrupting(line) as interrupting:
            optimizer.step()
        return interrupting.lines

    model, optimizer = begin()
    lines = step(optimizer, 0)
    expected = weights_of(model)
    caught = 0
    for place in range(1, 20):
        model, optimizer = begin()
        for line in (lines * 9 // 10, place * lines // 20 if place < 16 else 5 * place, 0):
            try:
                step(optimizer, line)
                break
            except KeyboardInterrupt:
                caught += 1
                if line and optimizer.state and optimizer._interrupted is None:
                    break  # it came between the end of the step and the return of the call
        assert_same_bits(expected, weights_of(model))
    assert caught > 20, "hardly anything was interrupted twice: this tested nothing"


class Halves:
    """A model with two optimizers, one of each half; the first one has an ordinary layer, too."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        torch.manual_seed(5)
        self.head = nn.Linear(8, 8)
        self.first = deepoffload.CPUAdamW([*model[:6].parameters(), *self.head.parameters()], lr=1e-2)
        self.second = deepoffload.CPUAdamW(model[6:].parameters(), lr=1e-2)

    def begin(self) -> None:
        """A step, and the gradients of the next one."""
        for seed in (0, 1):
            self.first.zero_grad()
            self.second.zero_grad()
            (self.model(rows(seed=seed)).square().mean() + self.head(torch.ones(1, 8)).square().mean()).backward()
            if seed == 0:
                self.first.step()
                self.second.step()

    def result(self) -> Any:
        state = self.first.state_dict()["state"]
        return weights_of(self.model), weights_of(self.head), [state[number]["step"] for number in range(len(state))]


def land_elsewhere(halves: Halves) -> None:
    halves.model[6:](rows(seed=7)).square().mean().backward()


def step_elsewhere(halves: Halves) -> None:
    land_elsewhere(halves)
    halves.second.step()
    halves.second.zero_grad()


def land_again(halves: Halves) -> None:
    halves.model[4:](rows(seed=7)).square().mean().backward()


def land_in_ordinary(halves: Halves) -> None:
    halves.head(torch.full((1, 8), 2.0)).square().mean().backward()


def drop_in_ordinary(halves: Halves) -> None:
    halves.head.weight.grad = None


@pytest.mark.parametrize(
    ("meanwhile", "is_new"),
    [
        (land_elsewhere, False),
        (step_elsewhere, False),
        (land_again, True),
        (land_in_ordinary, True),
        (drop_in_ordinary, True),
    ],
)
def test_what_happens_before_the_step_is_tried_again(
    paging: Paging, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Halves], None], is_new: bool
) -> None:
    """Gradients of other parameters leave the step the same one. New gradients of its own make another step, as they
    would in plain PyTorch after a step that did not fail."""
    expected = Halves(plain(mlp))
    expected.begin()
    expected.first.step()
    meanwhile(expected)
    if is_new:
        expected.first.step()
    config = replace(SERIAL, step_overlap="none")
    halves = Halves(paging.build(mlp, config, key="mlp"))
    halves.begin()
    before = chunks_of(halves.model)
    halves.first.step()
    chunks = range(before + 1, chunks_of(halves.model))
    raised = 0
    for chunk in chunks[1::7]:
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={errno.EIO}"))
            halves = Halves(paging.build(mlp, config, key="mlp"))
        halves.begin()
        try:
            halves.first.step()
        except IoFailure:
            raised += 1
            meanwhile(halves)
            halves.first.step()
            assert_same_bits(expected.result(), halves.result())
    assert raised > 1, "hardly anything has failed: this tested nothing"
