"""A program that looks at anything, or changes anything, between backward and ``step()`` sees what plain PyTorch shows
it: no guess, but what was before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tests.optim.deferred import Pair, Start, backward, finish, units_guessed
from tests.optim.test_deferred_looks import HOLDS_MUCH, LOOKS, WRITES_BY_DATA
from tests.support.inspect import pager_of
from tests.support.paging import EVICTING, Paging

SETTING = replace(EVICTING, step_overlap="speculative", precision="bf16")


def guessed(start: Start) -> Any:
    """An optimizer whose last backward has updated some units on a guess."""
    optimizer = start.stepped()
    optimizer.max_grad_norm = 1e6
    optimizer.zero_grad()
    loss = backward(start.model, 9)
    if type(start.model[0].weight) is not nn.Parameter and pager_of(start.model).defer_updates:
        assert units_guessed(start.model) > 0, "nothing was guessed: this tests nothing"
    return optimizer, loss


@pytest.mark.parametrize("name", LOOKS)
def test_between_backward_and_step(paging: Paging, name: str) -> None:
    def program(start: Start) -> Any:
        optimizer, loss = guessed(start)
        seen = LOOKS[name](start.model, optimizer)
        optimizer.max_grad_norm = 0.05
        return loss, seen, finish(start.model, optimizer)

    pair = Pair(paging, SETTING)
    pair(program, room=4.0 if name in HOLDS_MUCH else None, serial=name in WRITES_BY_DATA)
