"""What ends a call of ``accumulate`` early leaves everything as it should be, and what is wrong is refused."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

import deepoffload
from deepoffload.accumulation.accumulate import model_loss
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.runtime.context import engine_of
from deepoffload.schedule.cost_model import Bandwidths
from tests.accumulation.loops import HORIZONTAL, VERTICAL, Steps
from tests.accumulation.trouble import Trouble
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, notes_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import RESIDENT, TIGHT, Paging
from tests.support.waiting import wait_until

COUNT = 3


def batches(step: int) -> list[Tensor]:
    return [batch(100 * step + micro) for micro in range(COUNT)]


MOMENTS = COUNT * 5


@pytest.mark.parametrize("order", [VERTICAL, HORIZONTAL])
def test_steps_after_trouble_are_those_of_an_undisturbed_run(
    paging: Paging, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Exceptions and Ctrl-C at random moments, a step after each, an evaluation between."""
    ends = []
    for disturbed in (False, True):
        model = paging.build(TinyGPT, TIGHT)
        trouble = Trouble(model)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        chosen, losses = random.Random(1), []
        for step in range(6):
            if disturbed:
                trouble.left = chosen.randrange(MOMENTS)
                trouble.raised = chosen.choice([ArithmeticError, KeyboardInterrupt, SystemExit])
                with pytest.raises(trouble.raised) as caught:
                    deepoffload.accumulate(model, batches(50 + step), trouble.loss, order=order)
                    signal.getsignal(signal.SIGINT)  # where the interrupt of a last moment arrives
                notes = notes_of(caught.value, caplog)
                caplog.clear()
                assert "gradients are dropped" in notes
                assert trouble.raised is KeyboardInterrupt or "in micro-batch" in notes
                assert getcurrent().parent is None
                with pytest.raises(KeyboardInterrupt):  # nothing holds it back any more
                    signal.raise_signal(signal.SIGINT)
                assert all(param.grad is None for param in model.parameters())
                assert not pager_of(model).hooks.opened() and pager_of(model).hooks.turns is None
                with torch.no_grad():
                    next_token_loss(model, batch(step))
            torch.manual_seed(step)
            losses += deepoffload.accumulate(model, batches(step), trouble.loss, order=order)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((losses, {name: param.detach().clone() for name, param in model.named_parameters()}))
    assert_same_bits(*ends)


@pytest.mark.parametrize("left", [7, None])
def test_a_thread_that_accumulates_holds_back_no_interrupts_of_the_main_one(paging: Paging, left: int | None) -> None:
    """It is ended in the middle, or goes to its end, while the main thread is inside a block of the shield."""
    model = paging.build(TinyGPT, TIGHT)
    trouble = Trouble(model)
    trouble.left, trouble.raised = left, ArithmeticError
    ended: list[Any] = []

    def accumulate() -> None:
        try:
            ended.append(deepoffload.accumulate(model, batches(0), trouble.loss, order=VERTICAL))
        except ArithmeticError as error:
            ended.append(error)

    thread = threading.Thread(target=accumulate, daemon=True)
    with SHIELD:
        thread.start()
        thread.join(60)
    assert isinstance(ended[0], ArithmeticError) is (left is not None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    # A collection that meets a greenlet of a thread which has ended crashes the process, sooner or later.
    # The main thread's own is not among the objects any more where something has called gc.freeze().
    wait_until(lambda: {found for found in gc.get_objects() if issubclass(type(found), greenlet)} <= {getcurrent()})


def test_a_gradient_that_was_there_before_is_added_to(paging: Paging) -> None:
    ends = []
    for order in (HORIZONTAL, VERTICAL):
        model = paging.build(TinyGPT, TIGHT)
        model.eval()
        next_token_loss(model, batch(77)).backward()
        before = model.blocks[1].attention.qkv.weight.grad.clone()
        deepoffload.accumulate(model, batches(0), next_token_loss, order=order)
        ends.append({name: param.grad.clone() for name, param in model.named_parameters()})
        assert not torch.equal(before, ends[-1]["blocks.1.attention.qkv.weight"])
    assert_same_bits(*ends)


def test_an_ordinary_model_is_trained_in_the_ordinary_order() -> None:
    ends = []
    for order in ("auto", VERTICAL):
        torch.manual_seed(3)
        ends.append(Steps(next_token_loss, batch).run(TinyGPT(), order))
    assert_same_bits(*ends)


@pytest.mark.parametrize("after", [0, 1])
def test_of_an_ordinary_model_only_gradients_that_were_added_to_are_dropped(
    after: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyGPT()
    next_token_loss(model, batch(77)).backward()
    before = {name: param.grad for name, param in model.named_parameters()}
    calls = iter(range(COUNT))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        if next(calls) == after:
            raise ArithmeticError("trouble")
        return next_token_loss(model, tokens)

    with pytest.raises(ArithmeticError) as caught:
        deepoffload.accumulate(model, batches(0), loss)
    for name, param in model.named_parameters():
        assert param.grad is (before[name] if after == 0 else None)
    assert ("before the call" in notes_of(caught.value, caplog)) is (after == 1)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_nothing_of_a_call_is_kept(paging: Paging, checkpointing: bool | None) -> None:
    model = paging.build(partial(TinyGPT, checkpointing=checkpointing), TIGHT)
    given = batches(0)
    seen = [weakref.ref(tokens) for tokens in given]
    deepoffload.accumulate(model, given, next_token_loss, order=VERTICAL)
    given.clear()
    gc.collect()
    assert [reference() for reference in seen] == [None] * COUNT


def backward_itself(model: nn.Module, tokens: Tensor) -> Tensor:
    next_token_loss(model, tokens).backward()
    return next_token_loss(model, tokens)


def step_itself(model: nn.Module, tokens: Tensor) -> Tensor:
    deepoffload.CPUAdamW(model.parameters()).step()
    return next_token_loss(model, tokens)


def test_loops_that_come_afterwards_get_guesses(paging: Paging) -> None:
    """They do not say which backward is the last one before a step; ``accumulate`` does."""
    model = paging.build(TinyGPT, replace(TIGHT, step_overlap="speculative"))
    optimizer = deepoffload.CPUAdamW(model.parameters())
    guessed = []
    for step in range(5):
        if step == 0:
            deepoffload.accumulate(model, batches(step), next_token_loss)
        else:
            next_token_loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        guessed.append(deepoffload.stats(model)["speculated"])
    assert guessed[-1] > guessed[1]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, tokens: model(tokens), "micro-batch 0.*one number.*given as loss= return one"),
        (None, r"model\(batch\) returned a tensor of shape.*pass loss=.*loss=lambda model, batch: my_loss"),
        (lambda model, tokens: next_token_loss(model, tokens).detach(), "no graph"),
        (lambda model, tokens: deepoffload.accumulate(model, [tokens]), "inside accumulate"),
        (backward_itself, "calls backward itself"),
        (step_itself, r"optimizer.step\(\) inside accumulate"),
    ],
)
def test_a_wrong_loss_function_is_refused(paging: Paging, loss: Any, message: str) -> None:
    for order in (VERTICAL, HORIZONTAL):
        model = paging.build(TinyGPT, TIGHT)
        with pytest.raises(UsageError, match=message):
            deepoffload.accumulate(model, batches(0), loss, order=order)
        assert getcurrent().parent is None


def test_what_cannot_be_is_refused_before_anything_runs(paging: Paging) -> None:
    model = paging.build(TinyGPT, TIGHT, gradient_accumulation_steps=2)
    accumulate = partial(deepoffload.accumulate, model, order=VERTICAL)
    with pytest.raises(UsageError, match="no micro-batches"):
        accumulate([])
    drawn: Any = iter(batches(0))
    wrong: list[Any] = [(model, None), (drawn, model), (model, drawn, "vertical")]
    for arguments, said in zip(wrong, ("a NoneType", "torch.nn.Module first", "a function.*not a str"), strict=True):
        with pytest.raises(UsageError, match=said):
            deepoffload.accumulate(*arguments)
    assert len(list(drawn)) == COUNT, "nothing was drawn"
    for scale in ("no", 0, None):
        with pytest.raises(UsageError, match=rf"scale={scale!r}\): say True .* or False"):
            deepoffload.accumulate(model, drawn, next_token_loss, scale=scale)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gradient_accumulation_steps = 2"):
        accumulate(batches(0), next_token_loss)
    with pytest.raises(UsageError, match="a dict without a loss.*pass loss=, a function"):
        accumulate(batches(0)[:2], lambda model, tokens: model_loss(lambda _: {"logits": model(tokens)}, tokens))
    with pytest.raises(UsageError, match="'vertical'"):
        deepoffload.accumulate(model, batches(0)[:2], next_token_loss, order="diagonal")
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UnsupportedError, match="saved_tensors_hooks"):
        accumulate(batches(0)[:2], next_token_loss)
    hook = model.blocks[1].register_forward_hook(lambda *_: accumulate(batches(0)[:1], next_token_loss))
    with pytest.raises(UsageError, match="inside a forward"):
        model(batch(0))
    hook.remove()
    assert len(accumulate(batches(0)[:2], next_token_loss)) == 2


def test_without_the_package_greenlet_micro_batches_run_one_by_one(
    paging: Paging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    model = paging.build(TinyGPT, TIGHT)
    with pytest.raises(UnsupportedError, match="greenlet, which is not installed .pip install greenlet.; use .horizon"):
        deepoffload.accumulate(model, batches(0), next_token_loss, order=VERTICAL)
    for order in (HORIZONTAL, "auto"):
        assert len(deepoffload.accumulate(model, batches(0), next_token_loss, order=order)) == COUNT


def test_the_order_follows_from_what_stays_in_memory_and_from_the_disk(paging: Paging) -> None:
    """It is decided by what the disk costs, and not for a model so small that switching costs more."""
    seen = []
    for setting, rate in ((RESIDENT, 1e6), (TIGHT, 1e6), (TIGHT, 1e12)):
        model = paging.build(TinyGPT, setting)
        engine = engine_of(model)
        assert engine.placement is not None
        engine.placement = replace(engine.placement, bandwidths=Bandwidths(rate, rate, rate, rate))

        def loss(model: nn.Module, tokens: Tensor) -> Tensor:
            seen.append(getcurrent().parent is None)
            return next_token_loss(model, tokens)

        deepoffload.accumulate(model, batches(0), loss)
    assert seen == [True] * COUNT + [False] * COUNT + [True] * COUNT


class Centred(nn.Module):
    """Its last lines read what its first ones have left on another module."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Module()
        self.place.mean = torch.zeros(())
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        self.place.mean = inputs.mean()
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs - self.place.mean))
        return (inputs * self.place.mean).square().mean()


def test_what_one_unit_leaves_on_a_module_for_another_is_seen_by_auto(paging: Paging) -> None:
    micro_batches = [torch.randn(3, 16, generator=torch.Generator().manual_seed(i)) + i for i in range(COUNT)]
    loss = partial(lambda model, inputs: model(inputs))
    found = []
    for order in ("horizontal", "auto"):
        model = paging.build(Centred, TIGHT, key="centred")
        engine = engine_of(model)
        assert engine is not None and engine.placement is not None
        engine.placement = replace(engine.placement, bandwidths=Bandwidths(1.0, 1.0, 1.0, 1.0))
        alone = []

        def noting(model: nn.Module, inputs: Tensor, alone: list[bool] = alone) -> Any:
            alone.append(getcurrent().parent is None)
            return loss(model, inputs)

        torch.manual_seed(2)
        losses = [deepoffload.accumulate(model, micro_batches, noting, order=order) for _ in range(2)]
        found.append((losses, [param.grad.clone() for param in model.parameters() if param.grad is not None]))
    assert alone == [False] * COUNT + [True] * COUNT  # in its first call the first forward has shown it
    assert_same_bits(*found)
