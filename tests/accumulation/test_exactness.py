"""``accumulate`` gives the bits of a plain loop that draws the same random numbers, in both orders, with activations
kept and computed again.

``python -m tests.accumulation.campaign`` does this for every model, setting and precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepoffload
from tests.accumulation.loops import HORIZONTAL, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps, plain_accumulation
from tests.models.zoo import t5 as small_t5
from tests.models.zoo import translation
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits
from tests.support.models import TinyGPT, batch, llama, mixtral, next_token_loss
from tests.support.paging import EVICTING, TIGHT, Paging


class OtherWays(nn.Module):
    """Micro-batches of which some skip layers, call one twice, or end early; weights of the root, shared ones, frozen
    ones, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(32))
        self.norm = nn.BatchNorm1d(32)
        self.layers[2].requires_grad_(False)
        self.layers[3][0].weight = self.layers[1][0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        way = int(tokens[0, 0]) % 4
        x = self.embedding(tokens) * self.scale
        for number, layer in enumerate(self.layers):
            if way != number:
                x = x + layer(x)
            if way == 1 and number == 2:
                x = torch.dropout(layer(x), 0.3, self.training)
            if way == 3 and number == 1:
                break
        return (self.norm(x.flatten(0, 1)) * self.scale).square().mean()


class SharedBehindCheckpoints(nn.Module):
    """The first and the last layer share a weight, and the backward of each reentrant checkpoint makes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


class EarlyGradients(nn.Module):
    """Some micro-batches skip both layers that share a weight with the last one: two gradients wait, the second one not
    so long."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4))
        self.layers[3][2].weight = self.layers[0][2].weight
        self.layers[3][0].weight = self.layers[1][0].weight

    def forward(self, seed: int) -> Tensor:
        x = self.embedding(batch(seed))
        for layer in self.layers[2:] if seed % 2 else self.layers:
            x = x + layer(x)
        return x.square().mean()


class SparseTable(nn.Module):
    """Some micro-batches use a table with sparse gradients twice, others only the second time: theirs come first."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(64, 32)
        self.first = nn.Embedding(64, 32, sparse=True)
        self.layer = nn.Linear(32, 32)
        self.second = nn.Embedding(64, 32, sparse=True)
        self.second.weight = self.first.weight

    def forward(self, seed: int) -> Tensor:
        tokens = batch(seed)
        x = self.layer((self.start if seed % 2 else self.first)(tokens))
        return (x + self.second(tokens)).square().mean()


class CalledTwice(nn.Module):
    """One layer is called without gradients and then twice with them: autocast casts its weights once for both, so
    their gradients add up in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            reference = self.layers[0](x)
        for layer in (*self.layers, *self.layers):
            x = x + layer(x)
        return (x - reference).square().mean()


def router_loss(model: Any, seed: int) -> Tensor:
    """Router logits of all layers leave them by a side door, and meet in the loss."""
    tokens = batch(seed)
    loss: Tensor = model(input_ids=tokens, labels=tokens, output_router_logits=True).loss
    return loss


def of_seed(model: nn.Module, seed: int) -> Tensor:
    return next_token_loss(model, batch(seed, rows=1 + seed % 3))  # micro-batches of different lengths


def t5_loss(model: Any, seed: int) -> Tensor:
    loss: Tensor = model(**translation(seed)).loss
    return loss


def other_ways(model: Any, seed: int) -> Tensor:
    loss: Tensor = model(batch(7 * seed))
    return loss


AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
CASES: dict[str, tuple[Callable[[], Any], Any, Steps]] = {
    "tied GPT, bf16": (TinyGPT, replace(TIGHT, precision="bf16"), Steps(of_seed, int, 5)),
    "GPT, checkpoints": (partial(TinyGPT, checkpointing=False), EVICTING, Steps(of_seed, int, 2)),
    "GPT, speculative": (TinyGPT, replace(TIGHT, step_overlap="speculative"), Steps(of_seed, int, 3, 4)),
    "GPT, reentrant checkpoints": (partial(TinyGPT, checkpointing=True), EVICTING, Steps(of_seed, int)),
    "Llama, autocast": (llama, TIGHT, Steps(of_seed, int, around=AUTOCAST)),
    "called twice, autocast": (CalledTwice, TIGHT, Steps(other_ways, int, around=AUTOCAST)),
    "Mixtral, router loss": (mixtral, EVICTING, Steps(router_loss, int)),
    "T5, fp16": (small_t5, replace(TIGHT, precision="fp16"), Steps(t5_loss, int)),
    "shared, reentrant checkpoints": (SharedBehindCheckpoints, EVICTING, Steps(other_ways, int, 4)),
    "early gradients": (EarlyGradients, EVICTING, Steps(lambda model, seed: model(seed), int, 4)),
    "other ways": (OtherWays, EVICTING, Steps(other_ways, int, 4, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_vertical_order_has_the_bits_of_a_plain_loop(
    paging: Paging, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, setting, steps = CASES[case]
    ways = (PLAIN, VERTICAL, VERTICAL_AGAIN)
    expected, *others = (steps.run(paging.build(build, setting, key=case), how) for how in ways)
    assert expected["weights"] and expected["losses"]
    for how, got in zip(ways[1:], others, strict=True):
        assert_same_bits(expected, got, how, nan_is_wrong=setting.precision != "fp16")
    assert "sets the attribute" not in caplog.text, "no unit of these leaves anything for another one"


def test_sparse_gradients_that_come_in_another_order_are_added_up(paging: Paging) -> None:
    ends = []
    for how in (PLAIN, HORIZONTAL, VERTICAL):
        model = paging.build(SparseTable, TIGHT)
        if how == PLAIN:
            plain_accumulation(model, [0, 1, 2], lambda model, seed: model(seed))
        else:
            deepoffload.accumulate(model, [0, 1, 2], lambda model, seed: model(seed), order=how)
        ends.append(model.first.weight.grad.to_dense())
    assert_same_bits(ends[0], ends[1], HORIZONTAL)
    assert_same_bits(ends[0], ends[2], VERTICAL)


def test_updates_inside_backward_wait_for_the_last_micro_batch(paging: Paging) -> None:
    """With step_overlap="in_backward" there are no gradients to be seen: losses and weights are compared."""
    ends = []
    for how, overlap in ((PLAIN, "deferred"), (VERTICAL, "in_backward"), (HORIZONTAL, "in_backward")):
        model = paging.build(TinyGPT, replace(TIGHT, step_overlap=overlap))
        optimizer, losses = deepoffload.CPUAdamW(model.parameters(), lr=1e-2), []
        for step in range(3):
            steps = Steps(next_token_loss, lambda seed, step=step: batch(1000 * step + seed), 3, steps=0)
            batches = [steps.batch_of(micro) for micro in range(3)]
            torch.manual_seed(step)
            if how == PLAIN:
                losses += plain_accumulation(model, batches, next_token_loss)
            else:
                losses += deepoffload.accumulate(model, batches, next_token_loss, order=how)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((losses, {name: param.detach().clone() for name, param in model.named_parameters()}))
    assert_same_bits(ends[0], ends[1], VERTICAL)
    assert_same_bits(ends[0], ends[2], HORIZONTAL)


def test_a_unit_is_visited_once_per_pass_whatever_the_number_of_micro_batches(paging: Paging) -> None:
    """The trace has one event for all micro-batches of a unit; in the ordinary order it has one for each."""
    events = []
    for how, count in ((VERTICAL, 1), (VERTICAL, 4), (HORIZONTAL, 4)):
        model = paging.build(llama, TIGHT)
        Steps(of_seed, int, count, steps=4).run(model, how)  # the first has another order than the others
        events.append(pager_of(model).order.trace.stats().cycle_events)
    assert events[0] == events[1]
    assert events[2] > 1.4 * events[1]
