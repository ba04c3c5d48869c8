"""CUDA graphs around paged layers are refused with a sentence, before anything has changed: a capture by the program,
and the modes of ``torch.compile`` that capture.

The simulated GPU has no graphs: there, the question whether something is captured is answered by the test. On CUDA the
capture is a real one. Which modes capture is read from what torch keeps of ``torch.compile``'s arguments, on both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from deepoffload.params.graph_modes import SETTING, refuse_graph_modes
from tests.support.gpu import Gpu, on_cpu
from tests.support.inspect import shown_memory_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp

build = partial(mlp, 32, 3)


def rows(gpu: Gpu) -> Tensor:
    return gpu.put(torch.randn(3, 32, generator=torch.Generator().manual_seed(0)))


def train(gpu: Gpu, model: nn.Module, optimizer: Any) -> Any:
    for _ in range(2):
        model(rows(gpu)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return on_cpu(weights_of(model))


def expected(gpu: Gpu) -> Any:
    plain = gpu.plain(build)
    return train(gpu, plain, deepoffload.CPUAdamW(plain.parameters(), lr=1e-2))


@contextlib.contextmanager
def capture(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert callable(torch.cuda.is_current_stream_capturing), "what is asked on CUDA"
    if gpu.simulated:
        with monkeypatch.context() as patch:
            patch.setattr(gpu.module, "is_current_stream_capturing", lambda: True, raising=False)
            yield
    else:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield


@pytest.mark.parametrize("use", ["forward", "door", "step"])
def test_a_capture_by_the_program(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    model = gpu.paged(build)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    inputs = rows(gpu)
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(inputs),
        "door": lambda: model[0].weight.sum(),
        "step": optimizer.step,
    }
    with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"), capture(gpu, monkeypatch):
        uses[use]()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def of_a_forward(model: nn.Module) -> Callable[[], None]:
    model[2].forward = torch.compile(model[2].forward, mode="reduce-overhead")
    return lambda: delattr(model[2], "forward")


def of_a_module(model: nn.Module) -> Callable[[], None]:
    model[2].compile(mode="max-autotune")
    return lambda: delattr(model[2], "_compiled_call_impl")


def of_a_child_that_is_replaced(model: nn.Module) -> Callable[[], None]:
    layer = model[2]
    model[2] = torch.compile(layer, options={"triton.cudagraphs": True})

    def undo() -> None:
        model[2] = layer

    return undo


def of_a_forward_by_a_backend(model: nn.Module) -> Callable[[], None]:
    model[2].forward = torch.compile(model[2].forward, backend="cudagraphs")
    return lambda: delattr(model[2], "forward")


def of_a_child_by_a_backend(model: nn.Module) -> Callable[[], None]:
    layer = model[2]
    model[2] = torch.compile(layer, backend="cudagraphs")

    def undo() -> None:
        model[2] = layer

    return undo


@pytest.mark.parametrize(
    "compiled",
    [of_a_forward, of_a_module, of_a_child_that_is_replaced, of_a_forward_by_a_backend, of_a_child_by_a_backend],
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_layers_compiled_with_graphs(
    gpu: Gpu, compiled: Callable[[nn.Module], Callable[[], None]], before: bool
) -> None:
    """Refused in every call, until it is undone; and where the model is placed."""
    if before:

        def with_graphs() -> nn.Module:
            model = build()
            compiled(model)
            return model

        with pytest.raises(UnsupportedError, match="is compiled with CUDA graphs.*docs/compile.md"):
            gpu.paged(with_graphs)
        return
    model = gpu.paged(build)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    undo = compiled(model)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="is compiled with CUDA graphs.*docs/compile.md"):
            model(rows(gpu))
    undo()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def test_a_whole_model_compiled_with_graphs(gpu: Gpu) -> None:
    model = gpu.paged(build)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    for how in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}):
        with pytest.raises(UnsupportedError, match="what calls it is compiled with CUDA graphs"):
            torch.compile(model, **how)(rows(gpu))
        torch._dynamo.reset()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def test_modes_without_graphs_and_the_cpu(gpu: Gpu) -> None:
    model = gpu.paged(build)
    memory = shown_memory_of(model)
    others = ({"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "eager"})
    ways = (*others, {"mode": "reduce-overhead"})
    for how in ways:
        layer = nn.Linear(4, 4)
        layer.forward = torch.compile(layer.forward, **how)  # type: ignore[method-assign]
        captures = how is ways[-1]
        assert bool((layer.forward.get_compiler_config() or {}).get(SETTING)) is captures
        if captures:
            with pytest.raises(UnsupportedError, match=r"Linear is compiled"):
                refuse_graph_modes(layer, memory)
        else:
            refuse_graph_modes(layer, memory)
    with deepoffload.offload_context(device="cpu", host_budget="8MiB"):
        on_host = build()
    refuse_graph_modes(layer, shown_memory_of(on_host))
