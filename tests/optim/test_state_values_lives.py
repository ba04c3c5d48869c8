"""Random lives of a state dict of paged parameters, next to one of ordinary parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepoffload.runtime.context import engine_of
from tests.checkpoint.training import ALL
from tests.optim.kinds import KINDS, Kind
from tests.optim.test_state_values import ADAMW_8BIT, build, copy_through_a_file, small, train, values_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.paging import Paging


class Life:
    """A run and its state dict. What a program does with it is what happens to the dict of ordinary parameters."""

    def __init__(self, model: nn.Module, kind: Kind, lead: Any) -> None:
        self.model = model
        self.optimizer = kind.ours(model.parameters())
        if lead is not None:
            self.optimizer.load_state_dict(lead)
        self.kept = copy.deepcopy(self.optimizer.state_dict())
        self.weights = weights_of(model)
        self.held = self.optimizer.state_dict()
        self.count = 0

    def step(self) -> None:
        train(self.model, self.optimizer, range(self.count, self.count + 1))
        if not self.count:
            self.held = self.optimizer.state_dict()  # one from before the first step is no more
        self.count += 1

    def hold(self) -> None:
        self.held = self.optimizer.state_dict()

    def keep(self) -> None:
        self.kept, self.weights = copy.deepcopy(self.held), weights_of(self.model)

    def keep_in_a_file(self) -> None:
        self.kept, self.weights = copy_through_a_file(self.held), weights_of(self.model)

    def go_back(self) -> None:
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(self.kept)
        self.hold()

    def load_itself(self) -> None:
        self.optimizer.load_state_dict(self.held)
        self.hold()

    def edit(self) -> None:
        self.step()  # of an ordinary parameter, the edits after a step are noticed
        with torch.no_grad():
            self.model[2].weight[:8].mul_(0.75)
        self.hold()  # an ordinary parameter's remainder follows when it is asked for

    def write(self) -> None:
        state = copy.deepcopy(self.held) if type(self.held["state"].get(0, {}).get("exp_avg")) is Tensor else self.held
        for entry in state["state"].values():
            for key, value in entry.items():
                if key.startswith("exp"):
                    value[1:].mul_(0.5)
        self.optimizer.load_state_dict(state)
        self.hold()

    def norms(self) -> list[float]:
        return [float(v.double().square().sum()) for entry in self.held["state"].values() for v in entry.values()]


LIVES = [name for name in vars(Life) if not name.startswith("_") and name != "norms"]


@settings(max_examples=40 if ALL else 8)
@given(st.lists(st.sampled_from(LIVES), min_size=4, max_size=14), st.sampled_from(["bf16", "keep"]), st.booleans())
def test_random_lives(nvme_path: Path, actions: list[str], precision: str, eight_bit: bool) -> None:
    """A state dict that is held, kept, written to and loaded again is that of ordinary parameters at every moment."""
    model = build(Paging(nvme_path), precision)
    kind = ADAMW_8BIT if eight_bit else KINDS[0]
    twin = small().to(next(model.parameters()).dtype)
    twin.load_state_dict(weights_of(model))
    ours = Life(model, kind, None)
    theirs = Life(twin, kind, copy.deepcopy(ours.held))
    for action in actions:
        for life in (ours, theirs):
            getattr(life, action)()
        assert ours.norms() == theirs.norms(), action
    assert_same_bits(values_of(theirs.held), values_of(ours.held))
    assert_same_bits(weights_of(twin), weights_of(model))
    engine_of(model).close()
