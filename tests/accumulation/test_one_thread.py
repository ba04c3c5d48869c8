"""All micro-batches share one thread: what torch keeps for it is each one's own, and one backward takes them unit by
unit, or one after the other where it has to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import deepoffload
from deepoffload.params.torch_private import (
    in_functorch,
    len_dispatch_stack,
    len_function_stack,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)
from deepoffload.params.torch_thread import TorchThread
from tests.accumulation.loops import PLAIN, VERTICAL, VERTICAL_AGAIN, Steps
from tests.support.loops import assert_same_bits
from tests.support.models import batch
from tests.support.paging import TIGHT, Paging

COUNT = 3
Seen = list[tuple[str, int]]


class Doubled(TorchFunctionMode):
    """Doubles what functional.silu returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is nn.functional.silu else found


class Halved(TorchDispatchMode):
    """Halves what aten.silu makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found / 2 if func is torch.ops.aten.silu.default else found


def thread_now() -> tuple[Any, ...]:
    hooks = top_saved_tensors_hooks(True) if saved_tensors_hooks_enabled() else "disabled"
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return *grad, *autocast, len_dispatch_stack(), len_function_stack(), torch._C._is_torch_function_enabled(), hooks


BLOCKS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.float16, cache_enabled=False),
    "function mode": Doubled,
    "default device": partial(torch.device, "meta"),
    "dispatch mode": Halved,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "no saved tensors": partial(torch.autograd.graph.disable_saved_tensors_hooks, "none here"),
    "no torch function": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("names", [*((name,) for name in BLOCKS), tuple(BLOCKS)[:7]], ids=str)
def test_what_blocks_have_changed_is_set_aside_and_put_back(names: tuple[str, ...]) -> None:
    before = thread_now()
    thread = TorchThread(torch.device("cpu"))
    with ExitStack() as blocks:
        for name in names:
            blocks.enter_context(BLOCKS[name]())
        inside = thread_now()
        assert inside != before
        back = thread.set_aside()
        assert back is not None and thread_now() == before
        with torch.no_grad(), torch.autocast("cpu"):  # another forward, which is in the middle of its blocks, too
            other = TorchThread(torch.device("cpu"))
            assert other.set_aside() is not None
        back.close()
        assert thread_now() == inside
    assert thread_now() == before


def test_inside_a_transform_or_what_has_no_switch_it_stays() -> None:
    thread, seen = TorchThread(torch.device("cpu")), []

    def transformed(x: Tensor) -> Tensor:
        seen.append((in_functorch(), thread.set_aside()))
        return x.sum()

    torch.func.grad(transformed)(torch.ones(2))
    torch.func.jvp(transformed, (torch.ones(2),), (torch.ones(2),))
    with torch._C._AutoDispatchBelowAutograd():
        seen.append((True, thread.set_aside()))
    with parametrize.cached():
        seen.append((True, thread.set_aside()))
    library = torch.library.Library("deepoffload_tests", "DEF")
    library.define("stops(Tensor x) -> Tensor")
    library.impl("stops", lambda x: seen.append((True, thread.set_aside())) or x * 2, "CompositeImplicitAutograd")
    torch.ops.deepoffload_tests.stops(torch.ones(2))
    assert seen == [(True, None)] * 5
    assert thread_now() == thread_now() and thread.set_aside() is not None


ASKED: ContextVar[int] = ContextVar("asked", default=-1)


class Layer(nn.Module):
    def __init__(self, seen: Seen, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.notes = (seen, name)

    def forward(self, x: Tensor) -> Tensor:
        seen, name = self.notes
        number = ASKED.get()
        seen.append((name, number))
        found = nn.functional.silu(self.linear(x))
        if found.requires_grad:
            found.register_hook(lambda _: seen.append((f"backward {name}", number)))
        return torch.dropout(found, 0.1, self.training)


def save_products(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def asked(number: int) -> Iterator[None]:
    token = ASKED.set(number)
    yield
    ASKED.reset(token)


class InBlocks(nn.Module):
    """Calls each layer inside another block of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []
        self.embedding = nn.Embedding(64, 32)
        names = ("autocast", "hooks", "reference", "selective", "inner", "reentrant", "modes", "last")
        self.layers = nn.ModuleDict({name: Layer(self.seen, name) for name in names})
        self.late = nn.Parameter(torch.ones(32))

    def forward(self, seed: int) -> Tensor:
        with asked(seed):
            return self.run(self.embedding(batch(seed)))

    def run(self, x: Tensor) -> Tensor:
        layers = self.layers
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x + layers["autocast"](x).float()
        with torch.autograd.graph.save_on_cpu():
            x = x + layers["hooks"](x)
        with torch.no_grad():
            reference = layers["reference"](x)
        contexts = partial(create_selective_checkpoint_contexts, save_products)
        x = x + checkpoint(layers["selective"], x, use_reentrant=False, context_fn=contexts)
        x = x + checkpoint(lambda y: layers["reentrant"](layers["inner"](y)), x, use_reentrant=True)
        with Doubled(), Halved():
            x = x + layers["modes"](x) * self.late
        return (layers["last"](x) - reference).square().mean()


def visits_of(seen: Seen, name: str) -> list[int]:
    """How far apart the visits of micro-batches are."""
    places = [place for place, (at, _) in enumerate(seen) if at == name]
    return [later - earlier for earlier, later in zip(places, places[1:], strict=False)]


def test_a_forward_finds_its_own_blocks_when_it_goes_on(paging: Paging) -> None:
    ends, seen = [], []
    for how in (PLAIN, VERTICAL, VERTICAL_AGAIN):
        model = paging.build(InBlocks, TIGHT, key="blocks")
        ends.append(Steps(lambda model, seed: model(seed), int, COUNT, 3).run(model, how))
        seen.append(model.seen[-len(model.seen) // 3 :])
    assert_same_bits(ends[0], ends[1], VERTICAL)
    assert_same_bits(ends[0], ends[2], VERTICAL_AGAIN)
    kept = seen[1]
    for name in ("autocast", "hooks", "reference", "selective", "inner", "modes"):
        assert visits_of(kept, name)[:2] == [1, 1], name
    assert [at for at in kept if at[0] == "backward hooks"] == [("backward hooks", 200 + i) for i in range(COUNT)]
    assert visits_of(kept, "backward hooks") == [1, 1]


class Towers(nn.Module):
    """Two branches that meet in the loss: the backward of the one waits for that of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []
        self.embedding = nn.Embedding(64, 32)
        self.left = nn.ModuleList(Layer(self.seen, f"left {i}") for i in range(2))
        self.right = nn.ModuleList(Layer(self.seen, f"right {i}") for i in range(2))

    def forward(self, seed: int) -> Tensor:
        with asked(seed):
            left = right = self.embedding(batch(seed))
            for layer in self.left:
                left = layer(left)
            for layer in self.right:
                right = layer(right)
            return (left * right).square().mean()


def watched(model: nn.Module, seen: list[float]) -> None:
    weight: Any = model.get_submodule("left.0.linear").weight
    weight.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(0.0))


@pytest.mark.parametrize("hooks", [False, True])
def test_one_backward_of_all_or_one_after_the_other(paging: Paging, hooks: bool) -> None:
    """A program that looks at the gradients of a weight sees each, so backwards run one after the other."""
    ends, gradients, apart = [], [], []
    for how in (PLAIN, VERTICAL):
        model = paging.build(Towers, TIGHT, key="towers")
        gradients.append([])
        if hooks:
            watched(model, gradients[-1])
        ends.append(Steps(lambda model, seed: model(seed), int, COUNT, 2).run(model, how))
        apart.append(visits_of(model.seen[-len(model.seen) // 2 :], "backward left 1"))
    assert_same_bits(ends[0], ends[1], VERTICAL)
    assert gradients[0] == gradients[1] and len(gradients[0]) == (4 * COUNT if hooks else 0)
    assert apart[1] == ([4, 4] if hooks else [1, 1])


def test_the_logits_are_those_of_one_micro_batch_at_a_time(paging: Paging) -> None:
    """Also with a head that shares its weight with the embedding."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, seed: int) -> Tensor:
            x = self.embedding(batch(seed))
            for layer in self.layers:
                x = torch.tanh(layer(x))
            logits = self.head(x)
            logits.register_hook(lambda _: order.append(("backward", seed)))
            order.append(("forward", seed))
            return logits.logsumexp(-1).mean()

    ends = []
    for how in (PLAIN, VERTICAL):
        order: Seen = []
        ends.append(
            Steps(lambda model, seed: model(seed), int, COUNT, 2).run(paging.build(Tied, TIGHT, key="tied"), how)
        )
    assert_same_bits(ends[0], ends[1], VERTICAL)
    assert order[-2 * COUNT :] == [(at, 100 + i) for i in range(COUNT) for at in ("forward", "backward")]


def test_gradients_that_are_the_programs_are_added_to(paging: Paging) -> None:
    """Tensors of the program that stand in .grad, before and after."""
    ends = []
    for how in ("horizontal", "vertical"):
        model = paging.build(Towers, TIGHT, key="towers")
        weight: Any = model.get_submodule("left.0.linear").weight
        mine = weight.grad = torch.ones(32, 32)
        torch.manual_seed(1)
        deepoffload.accumulate(model, [0, 1, 2], lambda model, seed: model(seed), order=how)
        assert weight.grad is mine
        ends.append([param.grad.clone() for param in model.parameters()])
    assert_same_bits(*ends)
