"""``block.forward = torch.compile(block.forward)``, as docs/compile.md recommends it: same numbers, and nothing is
compiled after the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.support.loops import assert_same_bits, gradients_of
from tests.support.models import Block, mlp, rows
from tests.support.paging import EVICTING, TIGHT, Paging, plain

UNIT_IS_A_BLOCK = 1 << 20
"""A budget with which a whole block is one unit, so that only the block itself has hooks."""
UNIT_IS_A_LAYER = 400 << 10


def build() -> nn.Sequential:
    return nn.Sequential(*[Block(48, 4, 0.0) for _ in range(4)])


def batches(step: int) -> Tensor:
    return torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(step))


class Counting:
    """A backend that runs what Dynamo found, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.asked += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_forwards(model: nn.Sequential, backend: Any, **options: Any) -> None:
    for block in model:
        block.forward = torch.compile(block.forward, backend=backend, **options)


def compile_in_place(model: nn.Sequential, backend: Any, **options: Any) -> None:
    for block in model:
        block.compile(backend=backend, **options)


def train(model: nn.Module, optimizer: Any, backend: Counting) -> tuple[Any, list[float], list[int]]:
    losses, asked = [], []
    gradients: Any = None
    for step in range(4):
        loss = model(batches(step)).square().mean()
        loss.backward()
        gradients = gradients or gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        asked.append(backend.asked)
    return gradients, losses, asked


@pytest.mark.parametrize(
    ("put_on", "budget", "options"),
    [
        (compile_forwards, UNIT_IS_A_BLOCK, {}),
        (compile_forwards, UNIT_IS_A_BLOCK, {"fullgraph": True}),
        (compile_forwards, UNIT_IS_A_LAYER, {}),
        (compile_in_place, UNIT_IS_A_LAYER, {}),
    ],
    ids=["forward", "forward-fullgraph", "forward-smaller-units", "module-compile"],
)
def test_compiled_layers(paging: Paging, put_on: Callable[..., None], budget: int, options: dict[str, Any]) -> None:
    reference = plain(build)
    backend = Counting()
    put_on(reference, backend, **options)
    gradients, losses, _ = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), backend)

    with paging.context(EVICTING, budget):
        torch.manual_seed(0)
        model = build()
    backend = Counting()
    put_on(model, backend, **options)
    got, got_losses, asked = train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-3), backend)
    assert_same_bits(gradients, got)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    assert asked[0] and asked[-1] == asked[1], f"compiled again in later steps: {asked}"


@pytest.mark.parametrize("kind", ["CPUAdamW", "paged", "accumulate"])
def test_whole_steps_are_compiled_without_a_word(paging: Paging, kind: str) -> None:
    """Steps and what makes the optimizer are compiled functions. Dynamo warns of no function of ours that it cannot
    follow, and compiles none again and again."""
    import torch._dynamo.utils

    torch._dynamo.utils.warn_once_cache.clear()

    def make(model: nn.Module) -> Any:
        if kind == "paged":
            return deepoffload.paged(torch.optim.AdamW, model.parameters(), lr=1e-3, foreach=False)
        return deepoffload.initialize(model=model, config={"optimizer": {"type": "AdamW", "params": {}}})[1]

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        if kind == "accumulate":
            (loss,) = deepoffload.accumulate(model, [x], lambda model, x: model(x).square().mean(), order="vertical")
        else:
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = []
    for compiled in (False, True):
        made, stepped = (torch.compile(each, backend="eager") if compiled else each for each in (make, step))
        with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            warnings.filterwarnings("error", "Dynamo does not know")
            with paging.context(EVICTING, UNIT_IS_A_LAYER):
                torch.manual_seed(0)
                model = build()
            optimizer = made(model)
            found.append([stepped(model, optimizer, batches(number)) for number in range(4)])
    assert [loss.item() for loss in found[0]] == [loss.item() for loss in found[1]]


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_compiled_function_builds_no_paged_model(paging: Paging, made_inside: bool) -> None:
    before = None if made_inside else paging.context(EVICTING, UNIT_IS_A_LAYER)

    def make() -> nn.Module:
        with before or deepoffload.offload_context(host_budget=UNIT_IS_A_LAYER):
            return build()

    with pytest.raises(UnsupportedError, match=r"offload_context in a function that torch.compile compiles: build the"):
        torch.compile(make, backend="eager")()


def test_fullgraph_of_a_whole_model_is_refused(paging: Paging) -> None:
    """The hooks of its layers are inside; Dynamo says so."""
    with paging.context(EVICTING, UNIT_IS_A_LAYER):
        model = build()
    compiled = torch.compile(model, backend=Counting(), fullgraph=True)
    with pytest.raises(Exception, match=r"_Hook|torch.compiler.disable"):
        compiled(batches(0))


def test_jit_is_refused(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script cannot compile a paged model.*deepcopy"):
        torch.jit.script(model)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace cannot record a paged model.*deepcopy"):
        torch.jit.trace(model, rows())
