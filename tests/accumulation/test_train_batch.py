"""``engine.train_batch`` is k calls of forward and backward, and step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import ClosedError, UsageError
from tests.accumulation.loops import HORIZONTAL, VERTICAL, draw_seeds
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import TIGHT, Paging

COUNT = 3
CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": COUNT,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
FP16 = {"fp16": {"initial_scale_power": 17, "hysteresis": 1}}
"""A scale with which the first steps overflow."""


def engine_of(paging: Paging, order: str, changes: dict[str, Any]) -> Any:
    config = CONFIG | changes | {"accumulation_order": order}
    setting = replace(TIGHT, precision="fp16" if changes else "keep")
    model = paging.build(TinyGPT, setting, key="train_batch", **config)
    return deepoffload.initialize(model=model)[0]


def by_calls(engine: Any, batches: list[Tensor]) -> Tensor:
    seeds, losses = draw_seeds(COUNT), []
    program = torch.get_rng_state()
    for seed, tokens in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        loss = next_token_loss(engine, tokens)
        losses.append(loss.detach().float())
        engine.backward(loss)
        if len(losses) < COUNT:
            engine.step()
    torch.set_rng_state(program)
    engine.step()
    return torch.stack(losses).mean()


@pytest.mark.parametrize("changes", [{}, FP16], ids=["fp32", "fp16 with overflows"])
def test_it_is_what_the_calls_do_one_by_one(paging: Paging, changes: dict[str, Any]) -> None:
    ends = []
    for how in ("calls", HORIZONTAL, VERTICAL):
        engine = engine_of(paging, HORIZONTAL if how == "calls" else how, changes)
        torch.manual_seed(9)
        seen: list[Any] = []
        for step in range(4):
            batches = [batch(10 * step + micro) for micro in range(COUNT)]
            loss = by_calls(engine, batches) if how == "calls" else engine.train_batch(iter(batches), next_token_loss)
            counts = (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.loss_scale)
            seen.append((loss, engine.get_global_grad_norm(), *counts))
        ends.append((seen, weights_of(engine.module)))
    assert ends[0][0][-1][2:4] == (4 * COUNT, 4)
    assert not changes or 0 < ends[0][0][-1][4] < 4
    assert_same_bits(repr(ends[0][0]), repr(ends[1][0]))
    assert_same_bits(repr(ends[0][0]), repr(ends[2][0]))
    assert_same_bits(ends[0][1], ends[1][1])
    assert_same_bits(ends[0][1], ends[2][1])


def test_a_call_may_ask_for_an_order_and_for_activations(paging: Paging) -> None:
    """The forward of a layer runs again where activations are not kept."""
    ends, runs = [], []
    for order, activations in ((HORIZONTAL, "keep"), (HORIZONTAL, "recompute"), (VERTICAL, "recompute")):
        engine = engine_of(paging, "auto", {})
        calls: list[object] = []
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module))
        torch.manual_seed(9)
        batches = iter([batch(micro) for micro in range(COUNT)])
        loss = engine.train_batch(batches, next_token_loss, order=order, activations=activations)
        ends.append([loss, weights_of(engine.module)])
        runs.append(len(calls))
    assert runs[0] < runs[1] == runs[2]
    assert_same_bits(ends[0], ends[1])
    assert_same_bits(ends[0], ends[2])


class WithLoss(nn.Module):
    """Makes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.gpt, tokens)


def test_its_own_loader_starts_again_and_an_iterator_may_not_end_early(paging: Paging) -> None:
    data = [batch(number, rows=1)[0] for number in range(8)]  # four micro-batches
    model = paging.build(WithLoss, TIGHT, **CONFIG)
    engine, _, loader, _ = deepoffload.initialize(model=model, training_data=data)
    for _ in range(3):
        assert float(engine.train_batch()) > 0
    before = weights_of(engine.module)
    with pytest.raises(UsageError, match="ended after 1 of 3"):
        engine.train_batch(iter([batch(0)]))
    with pytest.raises(UsageError, match="takes an iterator"):
        engine.train_batch(loader)
    for wrong in ({"order": "diagonal"}, {"activations": "some"}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=rf"engine.train_batch\({name}='{value}'\): there are 'auto'"):
            engine.train_batch(**wrong)
    assert (engine.micro_steps, engine.global_steps) == (9, 3)
    assert_same_bits(before, weights_of(engine.module))
    engine.backward(engine(batch(0)))
    engine.step()
    with pytest.raises(UsageError, match="1 of 3 micro-steps are made"):
        engine.train_batch()
    engine.destroy()
    with pytest.raises(ClosedError, match="the training engine was closed"):
        engine.train_batch()


def test_it_is_refused_where_gradients_of_another_call_would_be_added(paging: Paging) -> None:
    engine = engine_of(paging, VERTICAL, {})
    engine.backward(next_token_loss(engine, batch(0)))
    batches = [batch(micro) for micro in range(COUNT)]
    with pytest.raises(UsageError, match="without engine.step"):
        engine.train_batch(iter(batches), next_token_loss)
    engine.zero_grad()

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        engine.step()
        return next_token_loss(model, tokens)

    with pytest.raises(UsageError, match=r"engine.step\(\) inside accumulate"):
        engine.train_batch(iter(batches), loss)
    engine.train_batch(iter(batches), next_token_loss)
    assert (engine.micro_steps, engine.global_steps) == (COUNT, 1)


def test_it_follows_another_number_of_micro_steps(paging: Paging) -> None:
    engine = engine_of(paging, VERTICAL, {})
    engine.set_train_batch_size(2 * (COUNT + 1))
    engine.train_batch(iter([batch(micro) for micro in range(COUNT + 1)]), next_token_loss)
    assert (engine.micro_steps, engine.global_steps) == (COUNT + 1, 1)


def test_without_data_or_a_loss_it_is_refused(paging: Paging) -> None:
    engine = engine_of(paging, VERTICAL, {})
    with pytest.raises(UsageError, match="no training_data"):
        engine.train_batch()
    with pytest.raises(UsageError, match=r"pass loss=.* for example loss=lambda model, batch: my_loss\(model\(batch\)"):
        engine.train_batch(iter([batch(micro) for micro in range(COUNT)]))
