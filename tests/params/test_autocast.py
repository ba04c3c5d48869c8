"""fp32 weights under ``torch.autocast``: the bits of plain PyTorch, and no second copy of the model in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepoffload import stats
from tests.support.loops import gradients_of, weights_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.models import batch, gpt2, llama, mlp, next_token_loss, rows
from tests.support.paging import TIGHT, Paging, Same


def trained(model: nn.Module, loss_of: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    seen = []
    for seed in range(3):
        with torch.autocast("cpu", dtype, **options):
            loss = loss_of(model, seed)
        loss.backward()
        seen.append((loss.detach(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights_of(model)


def square(model: nn.Module, seed: int) -> Tensor:
    return model(rows(seed=seed)).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_training(same: Same, dtype: torch.dtype, cache: bool) -> None:
    same(mlp, lambda model: trained(model, square, dtype, cache_enabled=cache))


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_training_transformers(same: Same, build: Any) -> None:
    same(build, lambda model: trained(model, lambda m, seed: next_token_loss(m, batch(seed))), key=build)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint(same: Same, use_reentrant: bool) -> None:
    def loss_of(model: nn.Sequential, seed: int) -> Tensor:
        x = rows(seed=seed).requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x.float().square().mean()

    same(mlp, lambda model: trained(model, loss_of))


class Gate(nn.Module):
    """Two layers of one argument. Behind a reentrant checkpoint it is a leaf, of which autocast keeps a cast, too: the
    gradients of both are added in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.gates, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.values(x).tanh() * self.norm(self.gates(x).float()).sigmoid())


@pytest.mark.parametrize("whole", [True, False], ids=["within", "after"])
def test_an_argument_behind_a_reentrant_checkpoint_is_cast_once(same: Same, whole: bool) -> None:
    """Backward runs within the block, or after it."""

    def program(model: nn.Sequential) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = rows().requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=True)
            loss = x.tanh().sum()
            if whole:
                loss.backward()
        if not whole:
            loss.backward()
        return gradients_of(model)

    same(lambda: nn.Sequential(*[Gate() for _ in range(4)]), program, key="gates")


class Views(nn.Module):
    """Casts of views, views of casts, a cast by hand, and a weight that is used in both types."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.other = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        x = x[:, :32] @ self.weight[:32]
        x = x @ self.other.to(torch.bfloat16)[:, 8:40].to(x.dtype)
        x = F.pad(x, (0, 32)).to(self.other.dtype)
        return torch.tanh(x * self.other[0] + (x @ self.other).float())


def test_views_and_casts_by_hand(same: Same) -> None:
    same(lambda: nn.Sequential(*[Views() for _ in range(6)]), lambda model: trained(model, square), key="views")


class Shares(nn.Module):
    """One weight in two layers: autocast adds their gradients in 16 bits, since both use the one cast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.body[6].weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Frozen(nn.Module):
    """Frozen and trainable weights, transposed ones, and two frozen ones of one shape with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        for layer in self.body[::4]:
            layer.requires_grad_(False)
        with torch.no_grad():
            self.body[4].weight.copy_(self.body[0].weight)
        self.scale = nn.Parameter(torch.ones(64, 64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.scale.t()) * self.scale[0].bfloat16() @ self.scale


def test_frozen_weights(same: Same) -> None:
    def program(model: Frozen) -> Any:
        seen = trained(model, square)
        model.body[4].requires_grad_(True)
        model.body[2].requires_grad_(False)
        return seen, trained(model, square)

    same(Frozen, program)


def test_frozen_weight_changed_between_forward_and_backward_is_refused(same: Same) -> None:
    """Plain PyTorch continues with the old cast, which is no longer there."""
    setting = same.setting
    model = same.paging.build(Frozen, setting)
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(model, 0)
    with torch.no_grad():
        model.body[4].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Repeats(nn.Module):
    """All layers in turn, twice: seen in the forward before autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x))


class RepeatsEach(Repeats):
    """Each layer twice, one after the other: seen at once."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(layer(x).float())
        return x


@pytest.mark.parametrize("kind", [Repeats, RepeatsEach])
def test_modules_that_are_called_twice(same: Same, kind: Any) -> None:
    def program(model: nn.Module) -> Any:
        model(rows()).sum().backward() if kind is Repeats else None
        return trained(model, square)

    same(kind, program, key=kind.__name__)


def test_tied_weights(same: Same) -> None:
    same(Shares, lambda model: trained(model, square))


def test_several_backwards_through_one_graph(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients_of(model)

    same(mlp, program)


def test_weight_changed_between_forward_and_backward_is_refused(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model, 0)
        with torch.no_grad():
            model[2].weight.mul_(2)
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return True  # plain PyTorch kept the cast and continues with it

    same(mlp, program)


MEMORY_CASES = [
    pytest.param(True, 0, None, id="training"),
    pytest.param(False, 0, None, id="no-grad"),
    pytest.param(True, 1, None, id="every-other-frozen"),
    pytest.param(True, 2, None, id="frozen"),
    pytest.param(True, 1, False, id="checkpoints"),
    pytest.param(True, 1, True, id="reentrant-checkpoints"),
]


@pytest.mark.parametrize(("grad", "frozen", "use_reentrant"), MEMORY_CASES)
def test_no_second_copy_of_the_model(paging: Paging, grad: bool, frozen: int, use_reentrant: bool | None) -> None:
    """A forward under autocast and its graph hold less than a quarter of what the casts of all weights would take. So
    it is with frozen weights, whose casts autograd cannot tell from activations."""
    width, depth = 512, 32

    def build() -> nn.Sequential:
        layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
        for layer in layers[:: 3 - frozen] if frozen else []:
            layer.requires_grad_(False)
        return nn.Sequential(*layers)

    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    with paging.context(TIGHT, 8 << 20):
        model = build()
    copy_bytes = 2 * width * width * depth
    x = rows(1, width).requires_grad_()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        model(x)  # what libraries keep is there now; no cast was kept
    with torch.set_grad_enabled(grad):
        give_back()
        before = resident_bytes()
        with torch.autocast("cpu", torch.bfloat16):
            output = run(x)
            give_back()
            held = resident_bytes() - before
    assert held < copy_bytes / 4, f"{held >> 10} KiB of {copy_bytes >> 10} KiB"
    if grad:
        output.float().sum().backward()
    assert stats(model)["evictions"] > 0
