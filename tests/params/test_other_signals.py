"""A handler of another signal than Ctrl-C that raises: training continues, right, or the model refuses it."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import ClosedError
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD, BooksLock
from deepoffload.schedule.cost_model import BlockKind
from tests.optim.test_step_failures import Interrupting
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import TIGHT, Paging

PLACES = 16
_SOURCE, _FIRST_LINE = inspect.getsourcelines(Block.to)
TORN_LINE = _FIRST_LINE + 1 + next(n for n, line in enumerate(_SOURCE) if line.strip().startswith("del "))


class LateError(Exception):
    pass


def too_late(number: int, frame: Any) -> None:
    raise LateError


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, too_late)
    yield
    signal.signal(signal.SIGALRM, before)


def backward(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(rows()).square().mean().backward()


def train(paging: Paging, line: int) -> tuple[Any, int]:
    """Weights after three steps, and lines of the second forward and backward, in which the alarm comes."""
    model = paging.build(mlp, TIGHT, key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    backward(model, optimizer)
    optimizer.step()
    with Interrupting(line, signal.SIGALRM) as alarm:
        try:
            backward(model, optimizer)
        except LateError:
            assert line
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
    return weights_of(model), alarm.lines


def test_training_goes_on_with_the_same_bits_or_is_refused(paging: Paging) -> None:
    expected, lines = train(paging, 0)
    refused = 0
    for place in range(PLACES):
        try:
            got, _ = train(paging, 1 + (2 * place + 1) * lines // (2 * PLACES + 1))
        except ClosedError as error:
            assert "too_late, the handler of SIGALRM, has raised LateError in the middle" in str(error)
            refused += 1
        else:
            assert_same_bits(expected, got)
    assert refused, "nothing was torn: this tested nothing"


def held(how: str) -> list[str]:
    """What a lock is told when an alarm comes under it."""
    lock, told = BooksLock(), list[str]()
    lock.when_torn = told.append
    with pytest.raises(LateError), lock:
        if how == "outside":
            SHIELD.outside(signal.raise_signal, signal.SIGALRM)
        elif how == "by the program":
            raise LateError
        else:
            signal.raise_signal(signal.SIGALRM)
    assert not lock.is_mine()
    return told


def test_what_is_raised_while_the_books_are_right_ends_nothing() -> None:
    assert held("outside") == held("by the program") == []
    assert len(held("inside")) == 1
    signal.signal(signal.SIGALRM, functools.partial(too_late))
    assert len(held("inside")) == 1


def test_an_alarm_while_a_layer_computes_ends_nothing(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT, key="mlp")
    hook = model[2].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(LateError):
        model(rows())
    hook.remove()
    assert torch.equal(model(rows()), model(rows()))


class InTheMiddle(Interrupting):
    """Sends the signal when a gradient's block is no longer among those of its state, and not yet among others."""

    def _see_line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code is Block.to.__code__ and frame.f_lineno == TORN_LINE and not self.lines:
            if frame.f_locals["self"].kind is BlockKind.GRADIENT:
                self.lines = 1
                sys.settrace(None)
                os.kill(os.getpid(), self._number)
        return self._see_line


def test_gradients_of_a_torn_model_are_not_dropped_but_refused(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT, key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    backward(model, optimizer)
    with pytest.raises(LateError), InTheMiddle(0, signal.SIGALRM):
        optimizer.zero_grad()
    with pytest.raises(ClosedError, match="in the middle of a change of memory"):
        optimizer.zero_grad()
