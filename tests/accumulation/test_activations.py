"""What the forwards keep for their backwards, and that nothing else depends on it."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import deepoffload
from deepoffload.errors import UsageError
from deepoffload.params.torch_private import set_versions, version_of
from deepoffload.runtime.context import engine_of
from deepoffload.schedule.cost_model import Bandwidths
from tests.accumulation.loops import HORIZONTAL, HORIZONTAL_AGAIN, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps, accumulate
from tests.models.zoo import FAMILIES, t5
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, notes_of
from tests.support.models import batch, llama
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging

COUNT = 3


@dataclass
class Notes:
    """What a model's layers write down; no list of a module's own, which would count as what a forward leaves there.

    Attributes:
        made: activations. in_backward: how many of these were alive when a backward was in the middle of a layer.
    """

    made: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    in_backward: list[int] = field(default_factory=list)


class Probe(nn.Module):
    """A layer that writes down its activations."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        found = (x * self.weight).sigmoid()  # saved twice
        made = self.notes.made
        made.append(weakref.ref(found.untyped_storage()))
        found.register_hook(lambda _: self.notes.in_backward.append(alive(made)))
        return found.sin()


def alive(made: list[weakref.ref[torch.UntypedStorage]]) -> int:
    return sum(reference() is not None for reference in made)


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.embedding = nn.Embedding(64, 32)
        probes = [Probe(self.notes) for _ in range(3)]
        self.layers = nn.ModuleList(nn.Sequential(probe, nn.Linear(32, 32)) for probe in probes)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


def batches() -> list[Tensor]:
    return [batch(micro) for micro in range(COUNT)]


@pytest.mark.parametrize(("how", "kept"), [(VERTICAL, 9), (VERTICAL_AGAIN, 0), (HORIZONTAL_AGAIN, 0)])
def test_what_remains_of_a_forward(paging: Paging, how: str, kept: int) -> None:
    """Activations of all units, or none; in backward those of one unit."""
    model = paging.build(Probed, TIGHT, key="Probed")
    seen = []

    def loss(model: Any, tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens)
        seen.append(alive(model.notes.made))
        return found

    accumulate(model, batches(), loss, how)  # the first micro-batch of all runs alone
    model.notes.made.clear()
    model.notes.in_backward.clear()
    seen.clear()
    accumulate(model, batches(), loss, how)
    assert max(seen) == kept
    assert len(model.notes.made) == (9 if kept else 18)
    assert max(model.notes.in_backward) == (kept or 1)
    assert alive(model.notes.made) == 0


def runs_of(model: Any, **arguments: Any) -> int:
    before = len(model.notes.made)
    deepoffload.accumulate(model, batches(), lambda model, tokens: model(tokens), order=VERTICAL, **arguments)
    return len(model.notes.made) - before


def test_auto_measures_one_micro_batch_and_then_keeps_what_memory_holds(paging: Paging) -> None:
    model = paging.build(Probed, TIGHT, key="Probed")
    room = pager_of(model).order.activations
    room.allowed_bytes = 1  # as on a machine that has nothing free
    assert runs_of(model) == 9 + 6, "but for the first micro-batch, which is there"
    room.allowed_bytes = None
    assert runs_of(model) == 9
    room.measured(1 << 60)
    assert runs_of(model) == 18
    assert runs_of(model, activations="keep") == 9
    with pytest.raises(UsageError, match="'recompute'"):
        runs_of(model, activations="some")


def test_each_kind_of_call_is_counted_once(paging: Paging) -> None:
    """What is known is added up, and longer micro-batches, or more weights that are trained, are counted."""
    model = paging.build(lambda: llama(num_hidden_layers=2), TIGHT)
    room = pager_of(model).order.activations
    found = []
    for length, frozen in ((8, False), (8, False), (16, False), (8, True), (8, False)):
        model.model.layers[0].requires_grad_(not frozen)
        room.micro_batch_bytes = None
        tokens = [batch(seed)[:, :length] for seed in range(COUNT)]
        deepoffload.accumulate(model, tokens, lambda model, x: model(x, labels=x).loss, order=VERTICAL)
        found.append(room.micro_batch_bytes)
    short, again, long, part, last = found
    assert short == again == last and long > 1.5 * short and part < short


def edit(argument: Tensor) -> None:
    with torch.no_grad():
        argument.zero_()


class Edited(nn.Module):
    """A program that uses the memory of a layer's argument for something else, which autograd allows where the layer
    has not saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            argument = x * 2
            x = layer(argument)
            edit(argument)
        return x.square().mean()


def test_arguments_that_are_edited_afterwards(paging: Paging, caplog: pytest.LogCaptureFixture) -> None:
    """Such layers cannot run again. ``auto`` finds them, and ``recompute`` says so."""
    ends = []
    for activations in ("keep", "auto", "recompute"):
        if activations != "recompute":  # what is known of a model is known to the next call
            model = paging.build(Edited, TIGHT)
        model.zero_grad()
        losses = deepoffload.accumulate(model, batches(), order=VERTICAL, activations=activations)
        ends.append((losses, [param.grad.clone() for param in model.parameters()]))
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])
    model = paging.build(Edited, TIGHT)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        deepoffload.accumulate(model, batches(), order=VERTICAL, activations="recompute")
    assert 'use activations="keep"' in notes_of(caught.value, caplog)


class WithState(nn.Module):
    """Layers that change their buffers in each forward; those of the first one decide what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            [spectral_norm(nn.Linear(32, 32)), nn.Sequential(nn.InstanceNorm1d(16, track_running_stats=True))]
        )
        self.layers.append(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(32, 32)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def past_loss(model: Any, seed: int) -> Tensor:
    """The second half of a text, of which the keys and values of the first half are there."""
    tokens = batch(seed)
    with torch.no_grad():
        past = model(tokens[:, :8], use_cache=True).past_key_values
    loss: Tensor = model(tokens[:, 8:], past_key_values=past, labels=tokens[:, 8:]).loss
    return loss


CASES: dict[str, tuple[Callable[[], Any], Steps]] = {
    "buffers": (WithState, Steps(lambda model, seed: model(batch(seed)), int, 3, 3)),
    "a cache with a past": (partial(llama, num_hidden_layers=2), Steps(past_loss, int, 2, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_with_a_state_run_once_for_all_that_can_be_seen(paging: Paging, case: str) -> None:
    build, steps = CASES[case]
    expected, *others = (steps.run(paging.build(build, TIGHT, key=case), how) for how in (PLAIN, VERTICAL_AGAIN))
    assert_same_bits(expected, others[0])


class Draws(nn.Module):
    """Scales by numbers from generators that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = (
            random.random() + torch.rand(32, generator=self.generator) + torch.from_numpy(np.random.rand(32)).float()
        )
        return x + self.linear(x * drawn).tanh()


def draws() -> nn.Module:
    random.seed(1)
    np.random.seed(2)
    return nn.Sequential(nn.Embedding(64, 32), Draws(), Draws(), nn.Linear(32, 8))


@pytest.mark.parametrize(("how", "count"), [(HORIZONTAL_AGAIN, COUNT), (VERTICAL_AGAIN, 1)])
def test_a_second_run_draws_the_same_from_all_generators(paging: Paging, how: str, count: int) -> None:
    """They stand where they stood afterwards, so the next step draws what it draws in a plain loop, too."""
    steps = Steps(lambda model, seed: model(batch(seed)).square().mean(), int, count, 3)
    expected, found = (steps.run(paging.build(draws, TIGHT, key="Draws"), each) for each in (PLAIN, how))
    assert_same_bits(expected, found)


class Layer(nn.Module):
    """Computes with what is on modules, and leaves something on each: on itself, on ``place``, in a list there."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)  # the child's, which makes it a unit
        self.places = (place,)  # the root's, and no part of this module
        self.calls = 0
        self.before = torch.zeros(())
        self.mask: Tensor | None = None
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.notes.in_backward.append(self.calls)  # a second run ends when it has what backward needs
        (place,) = self.places
        assert self.mask is not None
        self.calls += 1
        x = x + torch.tanh((x - place.mean * place.depth) @ self.weight * self.mask / self.calls + self.before)
        self.before = x.detach().mean()
        place.depth += 1
        place.mean = x.mean()
        place.aux.append(x.square().mean() * len(place.aux))
        return x


class LeavesMuch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Module()
        self.place.depth, self.place.mean, self.place.aux = 0, torch.zeros(()), []
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer(self.place) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.place.depth = 1
        x = self.embedding(tokens)
        self.place.mean = x.mean()
        for number, layer in enumerate(self.layers):
            layer.mask = x.detach() > number / 10
            x = layer(x)
            layer.mask = None
        found = x.square().mean() * self.place.mean + sum(self.place.aux) / 10
        self.place.aux.clear()
        return found


def left_on(model: Any) -> list[Any]:
    last = [layer.before for layer in model.layers]
    return [last, [layer.calls for layer in model.layers], model.place.depth, model.place.mean.detach()]


def test_attributes_are_what_they_were_when_a_unit_runs_again(paging: Paging) -> None:
    """And the second runs leave none, whether the forward that shows them is this one or an earlier one. In vertical
    order micro-batches would see those of others: "auto" notices, also that the masks come and go."""
    ends, runs = [], []
    for order, activations in ((HORIZONTAL, "keep"), (HORIZONTAL, "recompute"), ("auto", "recompute")):
        model = paging.build(LeavesMuch, TIGHT, key="leaves")
        engine = engine_of(model)
        assert engine is not None and engine.placement is not None
        engine.placement = replace(engine.placement, bandwidths=Bandwidths(1.0, 1.0, 1.0, 1.0))  # so slow: vertical
        torch.manual_seed(1)
        seen: list[Any] = []
        for _ in range(3):
            arguments = {"order": order, "activations": activations}
            seen.append(deepoffload.accumulate(model, batches(), lambda model, x: model(x), **arguments))
            seen.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
            seen.append(left_on(model))
            model.zero_grad()
        ends.append(seen)
        runs.append(len(model.layers[0].notes.in_backward))
    assert runs == [9, 18, 18]
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


class Joined(nn.Module):
    """Computes one way where it gets one tensor twice, as attention does, and another way where it gets two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, key=x, more=[x, None, x])
        return x.logsumexp(-1).mean()


class Attending(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, query: Tensor, key: Tensor, more: list[Tensor | None]) -> Tensor:  # type: ignore[override]
        found = super().forward(query).sigmoid()
        return found if key is query and more[0] is more[2] is key else found + super().forward(key)


def test_arguments_that_were_one_object_are_one_again(paging: Paging) -> None:
    runs = []
    for how in (PLAIN, VERTICAL_AGAIN, HORIZONTAL_AGAIN):
        model = paging.build(Joined, EVICTING, key="Joined")
        runs.append(Steps(lambda model, tokens: model(tokens), batch, COUNT, 2).run(model, how))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


def test_a_cache_of_keys_is_empty_again(paging: Paging) -> None:
    """With one, attention computes with keys that have been copied, which lie otherwise in memory: T5's backward rounds
    otherwise then."""
    runs = []
    for how in (PLAIN, VERTICAL_AGAIN, HORIZONTAL_AGAIN):
        model = paging.build(t5, RESIDENT, key="T5")
        runs.append(Steps(FAMILIES["T5"].loss, int, 2, 2).run(model, how))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(runs[0], runs[2])


def test_what_was_written_before_the_first_forward_is_not_its_edit(paging: Paging) -> None:
    model = paging.build(Joined, RESIDENT, key="Joined")
    weight = model.embedding.weight
    set_versions((weight,), (version_of(weight) + 1,))  # as what passes no door does, and nothing has looked since
    losses = accumulate(model, batches(), lambda model, tokens: model(tokens), VERTICAL)
    assert len(losses) == COUNT
