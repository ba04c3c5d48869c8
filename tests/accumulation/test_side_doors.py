"""What enters and leaves units by another way than a tensor as an argument, and what blocks change for the whole
process: vertical order gives the bits of a plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import deepoffload
from deepoffload.errors import UnsupportedError
from deepoffload.runtime.context import engine_of
from deepoffload.schedule.cost_model import Bandwidths
from tests.accumulation.loops import HORIZONTAL_AGAIN, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps
from tests.support.default_dtype import default_dtype
from tests.support.loops import assert_same_bits, gradients_of, notes_of
from tests.support.models import batch
from tests.support.paging import EVICTING, Paging

STEPS = Steps(lambda model, seed: model(seed), int, 3, 3)
WIDTH = 32


class Block(nn.Module):
    """Uses its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + torch.tanh(x @ self.first) * torch.sigmoid(x @ self.second)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, last: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList((block(), block(), block(), (last or block)()))

    def last(self, *args: Any) -> Tensor:
        found: Tensor = self.layers[-1](*args)
        return found

    def body(self, seed: int) -> Tensor:
        x: Tensor = self.embedding(batch(seed))
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


class UsedOutside(Net):
    """What enters the last unit is used after it, too."""

    def forward(self, seed: int) -> Tensor:
        x = self.body(seed)
        return (x * 1.3 + self.last(x)).square().mean() + x.exp().mean()


class Router(nn.Module):
    """Puts its loss into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Tensor], state: dict[str, Any]) -> Tensor:
        found: Tensor = self.router(x)
        losses.append(found.logsumexp(-1).mean())
        state["seen"] = x * 2
        return torch.tanh(found) + state["scale"]


class Edits(Block):
    """Edits the gradient of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 1.1 + 1e-3)
        return super().forward(x)


class EditedInside(UsedOutside):
    def __init__(self) -> None:
        super().__init__(Edits)


class IntoLists(Net):
    def __init__(self) -> None:
        super().__init__(Router)

    def forward(self, seed: int) -> Tensor:
        x, losses = self.embedding(batch(seed)), list[Tensor]()
        state = {"scale": x.mean()}
        for layer in self.layers:
            x = layer(x, losses, state)
        return x.square().mean() + sum(losses) + state["seen"].square().mean()


class Own(Tensor):
    """A class of the program's."""


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = getattr(x, "factor", 7.0) * (3.0 if type(y) is Own else 1.0)
        return self.linear(x) * factor


class Attributes(Net):
    """Tensors with attributes, and with a class of the program's."""

    def __init__(self) -> None:
        super().__init__(last=Tagged)

    def forward(self, seed: int) -> Tensor:
        x: Any = self.body(seed)
        x.factor = 2.0
        return self.last(x, (x * 2).as_subclass(Own)).square().mean()


class CheckpointedLoss(Net):
    """A reentrant checkpoint cannot run inside ``torch.autograd.grad``."""

    def forward(self, seed: int) -> Tensor:
        return checkpoint(lambda y: y.logsumexp(-1).mean(), self.last(self.body(seed)), use_reentrant=True)


class CheckpointedHead(Net):
    """Reentrant checkpoints use a weight that a unit uses, too."""

    def forward(self, seed: int) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            return F.linear(y, self.embedding.weight).logsumexp(-1).mean()

        chunks = self.last(self.body(seed)).chunk(2, 1)
        return sum(checkpoint(loss, chunk, use_reentrant=True) for chunk in chunks)


class Stopped(torch.autograd.Function):
    """Gives no gradient to what comes from some micro-batches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stops: bool) -> Tensor:
        ctx.stops = stops
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None if ctx.stops else gradients[0] * 2, None


class StopsSome(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, stops: bool) -> Tensor:
        found: Tensor = self.linear(Stopped.apply(x, stops))
        return found


class NoisyGradients(Net):
    """Hooks on tensors between layers draw random numbers."""

    def forward(self, seed: int) -> Tensor:
        x = self.embedding(batch(seed))
        for layer in self.layers:
            x = layer(x) * 1.5
            x.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))
        return x.square().mean()


class NoGradient(Net):
    """The first micro-batch gives no gradients to the layers below, and the others do."""

    def __init__(self) -> None:
        super().__init__(last=StopsSome)

    def forward(self, seed: int) -> Tensor:
        return self.last(self.body(seed), seed % 100 == 0).square().mean()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=True)


class CheckpointsInside(Net):
    """Units that are called twice, with a reentrant checkpoint inside each."""

    def __init__(self) -> None:
        super().__init__(Inside)

    def forward(self, seed: int) -> Tensor:
        x = self.body(seed)
        for layer in self.layers:
            x = layer(x)
        return x.logsumexp(-1).mean()


class PositionsInside(Net):
    """A weight that layers behind reentrant checkpoints read, and that no module which is called has (DeBERTa)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, WIDTH)

    def forward(self, seed: int) -> Tensor:
        x = self.embedding(batch(seed))
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: layer(y * self.positions.weight.mean(0)), x, use_reentrant=True)
        return x.logsumexp(-1).mean()


class Coroutine(Net):
    """Layers run in an event loop, of which a thread has one at a time."""

    def forward(self, seed: int) -> Tensor:
        async def body() -> Tensor:
            return self.body(seed)

        return self.last(asyncio.run(body())).square().mean()


class OfProcess(nn.Module):
    """Sees what blocks around it have changed for the process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attention = torch.backends.cuda.flash_sdp_enabled() + 2 * torch.backends.cuda.math_sdp_enabled()
        return self.linear(x) * (torch.full((), 0.1).double() + attention).float()


class Switched(Net):
    def __init__(self) -> None:
        super().__init__(OfProcess)

    def forward(self, seed: int) -> Tensor:
        x = self.embedding(batch(seed))
        with sdpa_kernel(SDPBackend.MATH), default_dtype(torch.float64):
            x = self.layers[1](self.layers[0](x))
        return self.last(self.layers[2](x)).square().mean()


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.9


class Cached(Net):
    """Parametrized weights are computed once in each forward."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrize.register_parametrization(layer, "first", Scaled())

    def forward(self, seed: int) -> Tensor:
        with parametrize.cached():
            return self.last(self.layers[0](self.body(seed))).square().mean()


class HooksOfSeveral(Net):
    """A hook waits for gradients of tensors in the last unit and before it, and another one for the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, seed: int) -> Tensor:
        x, given = self.embedding(batch(seed)), list[Tensor]()
        for layer in self.layers:
            x = layer(x)
            given.append(x)
        register_multi_grad_hook(given, lambda gradients: self.count(0, *gradients))
        register_multi_grad_hook(given, lambda gradient: self.count(1, gradient), mode="any")
        return x.square().mean()

    def count(self, which: int, *gradients: Tensor | None) -> None:
        self.seen[which] += 1 if None not in gradients else 100


class Detaches(Block):
    """Detaches what it was called with."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found + x.detach_()


class DetachesArgument(Net):
    def __init__(self) -> None:
        super().__init__(last=Detaches)

    def forward(self, seed: int) -> Tensor:
        return self.last(self.body(seed)).square().mean()


class Doubles(torch.autograd.Function):
    """Doubles its argument in place, and returns something else, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2), weight * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, gradients[1] * 3


class EditsArgument(Block):
    def forward(self, x: Tensor) -> Tensor:
        x, weight = Doubles.apply(x, self.first)
        return super().forward(x) + weight.mean()


class EditedArgument(Net):
    def __init__(self) -> None:
        super().__init__(last=EditsArgument)

    def forward(self, seed: int) -> Tensor:
        return self.last(self.body(seed) * 1).square().mean()


MODELS = (
    *(UsedOutside, EditedInside, IntoLists, Attributes, CheckpointedLoss, CheckpointedHead, CheckpointsInside),
    PositionsInside,
    *(Coroutine, Switched, NoGradient, NoisyGradients, Cached, HooksOfSeveral),
)


@pytest.mark.parametrize("build", MODELS)
def test_the_bits_are_those_of_a_plain_loop(paging: Paging, build: type[nn.Module]) -> None:
    expected, *others = (STEPS.run(paging.build(build, EVICTING), how) for how in (PLAIN, VERTICAL, VERTICAL_AGAIN))
    for how, got in zip((VERTICAL, VERTICAL_AGAIN), others, strict=True):
        assert_same_bits(expected, got, how)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("build", [DetachesArgument, EditedArgument])
def test_arguments_of_the_last_unit_may_be_edited_as_no_view_may_be(
    paging: Paging, build: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Where only a later micro-batch does so, torch's error says what follows, and the next call works."""
    expected = STEPS.run(paging.build(build, EVICTING), PLAIN)
    assert_same_bits(expected, STEPS.run(paging.build(build, EVICTING), VERTICAL), VERTICAL)
    model = paging.build(build, EVICTING)
    edits = type(model.layers[-1])
    model.layers[-1].__class__ = Block
    deepoffload.accumulate(model, [0, 1, 2], lambda model, seed: model(seed), order=VERTICAL)
    model.layers[-1].__class__ = edits
    with pytest.raises(RuntimeError, match="view") as error:
        deepoffload.accumulate(model, [0, 1, 2], lambda model, seed: model(seed), order=VERTICAL)
    assert "gets its arguments themselves" in notes_of(error.value, caplog)
    model.zero_grad()
    assert_same_bits(expected, STEPS.run(model, VERTICAL), VERTICAL)


class EarlyLosses(Net):
    """The losses of some micro-batches are a weight itself, or are made before the last unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, seed: int) -> Tensor:
        x = self.body(seed)
        early = x.square().mean() * self.scale
        late = self.last(x).square().mean() * self.scale
        return (self.scale, early, late)[seed % 3]


def test_losses_that_are_not_divided_may_be_made_anywhere(paging: Paging) -> None:
    ends = []
    for how in ("horizontal", "vertical"):
        model = paging.build(EarlyLosses, EVICTING)
        for _ in range(2):
            deepoffload.accumulate(model, [3, 4, 5, 6, 8, 7], lambda model, seed: model(seed), order=how, scale=False)
        ends.append(gradients_of(model))
    assert_same_bits(*ends)


class Frozen(Net):
    """Freezes a layer for a while."""

    def forward(self, seed: int) -> Tensor:
        made = self.layers[1](self.layers[0](self.embedding(batch(seed))))
        self.layers[2].requires_grad_(False)
        found = self.last(self.layers[2](made)).square().mean()
        self.layers[2].requires_grad_(True)
        return found + self.last(self.layers[2](made.detach())).exp().mean()


class Evaluates(Net):
    """Calls a layer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))

    def forward(self, seed: int) -> Tensor:
        x = self.layers[0](self.embedding(batch(seed)))
        x = self.layers[1].eval()(x)
        self.layers[1].train()
        return self.last(self.layers[2](x)).square().mean()


class Exchanged(Net):
    """Other tensors are in the places of weights for a while."""

    def forward(self, seed: int) -> Tensor:
        x = self.embedding(batch(seed))
        weights = {name: weight * (1 + x.mean()) for name, weight in self.layers.named_parameters()}
        names = {f"layers.{name}": weight for name, weight in weights.items()}
        return torch.func.functional_call(Body(self.layers), names, (x,)).square().mean()


class LimitsRows(Net):
    """Looking up a row limits its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, max_norm=3.0)

    def forward(self, seed: int) -> Tensor:
        return self.last(self.body(seed)).square().mean()


class Shrinks(Block):
    """Shrinks its weight in each forward, past autograd. ``quietly``: no counter moves."""

    quietly = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.first.data if self.quietly else self.first).mul_(0.9)
        return super().forward(x)


class ShrinksQuietly(Shrinks):
    quietly = True


class Shrunk(LimitsRows):
    def __init__(self) -> None:
        Net.__init__(self, Shrinks)


class ShrunkQuietly(LimitsRows):
    def __init__(self) -> None:
        Net.__init__(self, ShrinksQuietly)


class Body(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CHANGING = [
    *((Frozen, r"changes requires_grad of layers\..* or puts another tensor"), (Exchanged, "puts another tensor")),
    *((Evaluates, None), (LimitsRows, r"writes to the weight embedding\.weight")),
    *((Shrunk, r"writes to the weight layers\.0\.first"), (ShrunkQuietly, r"writes to the weight layers\.0\.first")),
]


@pytest.mark.parametrize(("build", "refusal"), CHANGING)
def test_a_forward_that_changes_what_weights_and_modules_are_runs_one_by_one(
    paging: Paging, build: type[nn.Module], refusal: str | None
) -> None:
    slow = Bandwidths(1.0, 1.0, 1.0, 1.0)
    expected = STEPS.run(paging.build(build, EVICTING), PLAIN)
    for how in ("auto", "auto, recompute", HORIZONTAL_AGAIN):
        model = paging.build(build, EVICTING)
        if issubclass(build, LimitsRows) and build is not LimitsRows and how != "auto":
            with pytest.raises(UnsupportedError, match=r"Shrinks.*: its forward writes to its weights"):
                STEPS.run(model, how)
            continue
        engine = engine_of(model)
        assert engine.placement is not None
        engine.placement = replace(engine.placement, bandwidths=slow)
        assert_same_bits(expected, STEPS.run(model, how), how)
    for _ in range(2 * (refusal is not None)):
        with pytest.raises(UnsupportedError, match=refusal):
            STEPS.run(model, VERTICAL)
        model.zero_grad()
