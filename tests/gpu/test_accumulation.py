"""Micro-batches that go through the model together on a device: the bits of a plain loop on that device and of the
other order, and no missing wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
from deepoffload import stats
from tests.accumulation.loops import HORIZONTAL, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps, plain_accumulation
from tests.models.zoo import t5 as small_t5
from tests.models.zoo import translation
from tests.support.gpu import Gpu, on_cpu
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, llama, mixtral, next_token_loss
from tests.support.simulated_gpu import settings


class TwoStreams(nn.Module):
    """Layers that use a weight on two streams. ``through_host``: with a computation of the CPU after each of them."""

    def __init__(self, gpu: Gpu, *, through_host: bool = False) -> None:
        super().__init__()
        self.gpu, self.through_host = gpu, through_host
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.2)]) for _ in range(4))
        for layer in self.layers:
            layer.forward = partial(self.layer, layer)

    def layer(self, layer: Any, x: Tensor) -> Tensor:
        here, side = self.gpu.module.current_stream(), self.gpu.module.Stream()
        side.wait_stream(here)
        with self.gpu.module.stream(side):
            x.record_stream(side)
            other = F.silu(layer[0](x))
        x = layer[1](layer[0](x))
        here.wait_stream(side)
        other.record_stream(here)
        x = x + other
        return self.gpu.put(x.cpu().sin()) if self.through_host else x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def text_loss(gpu: Gpu, model: Any, seed: int) -> Tensor:
    return next_token_loss(model, gpu.put(batch(seed, rows=1 + seed % 2)))


def router_loss(gpu: Gpu, model: Any, seed: int) -> Tensor:
    """Router logits of all layers leave them by a side door, and meet in the loss."""
    tokens = gpu.put(batch(seed))
    out = model.model(input_ids=tokens, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state)[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
    return loss + sum(layer.softmax(-1).square().mean() for layer in out.router_logits)


def t5_loss(gpu: Gpu, model: Any, seed: int) -> Tensor:
    loss: Tensor = model(**{name: gpu.put(value) for name, value in translation(seed).items()}).loss
    return loss


def row_loss(gpu: Gpu, model: nn.Module, seed: int) -> Tensor:
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
    return model(gpu.put(rows)).square().mean()


def on_streams(gpu: Gpu, model: Any, seed: int) -> Tensor:
    """Each micro-batch on another stream, with autocast there."""
    stream, program = gpu.module.Stream(), gpu.module.current_stream()
    stream.wait_stream(program)
    with gpu.module.stream(stream), torch.autocast(torch.device(gpu.device).type, torch.bfloat16):
        loss = text_loss(gpu, model, seed)
    program.wait_stream(stream)
    return loss


def of_text(build: Callable[[], nn.Module], _: Gpu) -> nn.Module:
    return build()


@dataclass(frozen=True)
class Case:
    """A model, what is trained on it, and how it is paged. ``room``: the device budget as a multiple of the least."""

    build: Callable[[Gpu], nn.Module]
    loss: Callable[[Gpu, Any, int], Tensor]
    room: float = 1.0
    config: tuple[tuple[str, Any], ...] = ()

    def check(self, gpu: Gpu, *ways: str) -> None:
        build, steps = partial(self.build, gpu), Steps(partial(self.loss, gpu), int)
        expected = on_cpu(steps.run(gpu.plain(build), PLAIN))
        config = {"host_budget": 1 << 20, **dict(self.config)}
        budget = int(gpu.least_bytes(build) * self.room)
        for how in ways:
            model = gpu.paged(build, budget, **config)
            assert_same_bits(expected, on_cpu(steps.run(model, how)), how)
            assert stats(model)["device_peak_bytes"] <= budget


GPT = partial(of_text, partial(TinyGPT, depth=2))
QUICK = {
    "tied GPT, least budget": Case(GPT, text_loss),
    "GPT, streams and autocast": Case(GPT, on_streams, 1.5),
    "two streams": Case(TwoStreams, row_loss),
    "two threads": Case(partial(TwoStreams, through_host=True), row_loss),
}
LEAVING = (("offload_activations", "host"), ("activation_budget", 1 << 20), ("host_budget", 4 << 20))
LONG = {
    "GPT, reentrant checkpoints": Case(partial(of_text, partial(TinyGPT, checkpointing=True)), text_loss),
    "GPT, activations leave": Case(GPT, text_loss, 1.5, LEAVING),
    "Llama, autocast, evicting": Case(partial(of_text, llama), on_streams, 2.0, (("evict_always", True),)),
    "Llama, guesses": Case(partial(of_text, llama), text_loss, 1.5, (("step_overlap", "speculative"),)),
    "Mixtral, router loss": Case(partial(of_text, partial(mixtral, experts_implementation="eager")), router_loss),
    "T5": Case(partial(of_text, small_t5), t5_loss, 1.5),
}


@pytest.mark.parametrize("name", QUICK)
def test_the_vertical_order_has_the_bits_of_a_plain_loop(gpu: Gpu, name: str) -> None:
    QUICK[name].check(gpu, VERTICAL, VERTICAL_AGAIN)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [(name, ("late", "random")[turn % 2]) for turn, name in enumerate(LONG)])
def test_other_models(gpu: Gpu, name: str, mode: str) -> None:
    """With copies as late as possible, or at random moments."""
    if name.startswith(("Llama", "Mixtral", "T5")):  # a machine that was lent for its GPU may lack them
        pytest.importorskip("transformers")
    if gpu.simulated:
        settings(mode=mode, seed=len(name))
    LONG[name].check(gpu, HORIZONTAL, VERTICAL, VERTICAL_AGAIN)


UPDATES = {
    "clipped": {"step_overlap": "deferred"},
    "in backward": {"step_overlap": "in_backward"},
    "in backward on the device": {"step_overlap": "in_backward", "offload_optimizer": "device"},
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_follows_at_once(gpu: Gpu, name: str) -> None:
    """The last gradients are still on their way from the device when the step asks for their norm. Updates inside
    backward wait for the last micro-batch."""
    ends, clip = [], 0.5 if name == "clipped" else None
    for how in (PLAIN, VERTICAL):
        model = gpu.plain(TinyGPT) if how == PLAIN else gpu.paged(TinyGPT, **UPDATES[name])
        optimizer, losses = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=clip), []
        for step in range(2):
            torch.manual_seed(step)
            seeds, loss_of = [3 * step + micro for micro in range(3)], partial(text_loss, gpu)
            if how == PLAIN:
                losses += plain_accumulation(model, seeds, loss_of)
            else:
                losses += deepoffload.accumulate(model, seeds, loss_of, order=how)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(torch.tensor(optimizer.grad_norm or 0.0))
        ends.append(on_cpu((losses, weights_of(model))))
    assert_same_bits(*ends)


def test_after_an_error_streams_and_generators_are_those_of_the_caller(gpu: Gpu) -> None:
    """Each micro-batch is parked inside a block that has changed its current stream."""
    model, calls = gpu.paged(TinyGPT), []
    loss_of = partial(on_streams, gpu)
    before = [float(loss) for loss in deepoffload.accumulate(model, [0, 1, 2], loss_of, order=VERTICAL)]

    def fail(*_: object) -> None:
        calls.append(gpu.module.current_stream())
        if len(calls) == 2:
            raise ArithmeticError("trouble")

    program, generator = gpu.module.current_stream(), gpu.module.get_rng_state()
    hook = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="trouble"):
        deepoffload.accumulate(model, [0, 1, 2], loss_of, order=VERTICAL)
    hook.remove()
    assert gpu.module.current_stream() == program and program not in calls and calls[0] != calls[1]
    assert torch.equal(gpu.module.get_rng_state(), generator)
    again = [float(loss) for loss in deepoffload.accumulate(model, [0, 1, 2], loss_of, order=VERTICAL)]
    assert len(again) == len(before)


def test_the_logits_are_those_of_one_micro_batch_at_a_time(gpu: Gpu) -> None:
    """The head and the loss go straight into their backward."""
    model, order = gpu.paged(partial(TinyGPT, depth=2)), []

    def loss_of(model: Any, seed: int) -> Tensor:
        logits = model(gpu.put(batch(seed)))
        logits.register_hook(lambda _: order.append(("backward", seed)))
        order.append(("forward", seed))
        return logits.float().logsumexp(-1).mean()

    for _ in range(2):  # the first call shows the order
        order.clear()
        deepoffload.accumulate(model, [0, 1, 2], loss_of, order=VERTICAL)
    assert order == [(at, seed) for seed in range(3) for at in ("forward", "backward")]
