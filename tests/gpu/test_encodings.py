"""Weights that are stored in another form than the device shows: what the device launches for that is in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepoffload.copies.accelerator import Accelerator
from tests.support.encodings import EncodedModel, Encoding, Fp32ShownAsBf16, Int8ShownAsFp32
from tests.support.gpu import Gpu, on_cpu
from tests.support.loops import assert_same_bits, to_bf16
from tests.support.models import mlp

WIDTH = 64
LAYER_BYTES = 20 << 10
"""Of a layer in fp32, in whole pages."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(WIDTH, 6)


def dequantised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(Int8ShownAsFp32.dequantised(param))
    return model.requires_grad_(False)


def rows(gpu: Gpu, seed: int, dtype: torch.dtype) -> Tensor:
    return gpu.put(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype))


def run_frozen(gpu: Gpu, model: nn.Module) -> list[Any]:
    seen = []
    for seed in range(3):
        x = rows(gpu, seed, torch.float32).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        seen += [on_cpu(loss), on_cpu(x.grad)]
    return seen


def train_sgd(gpu: Gpu, model: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    seen = []
    for seed in range(3):
        loss = model(rows(gpu, seed, torch.bfloat16)).float().square().mean()
        loss.backward()
        seen += [on_cpu(loss), [on_cpu(param.grad) for param in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [on_cpu(param) for param in model.parameters()]]


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize(
    ("encoding", "prepare", "run"),
    [(Int8ShownAsFp32, dequantised, run_frozen), (Fp32ShownAsBf16, to_bf16, train_sgd)],
    ids=["int8", "fp32"],
)
def test_as_plain_pytorch_on_the_device(
    gpu: Gpu, encoding: type[Encoding], prepare: Callable[[Any], nn.Module], run: Callable[..., Any], poison: bool
) -> None:
    expected = run(gpu, gpu.put(prepare(build())))
    model = build()
    if run is run_frozen:
        model.requires_grad_(False)
    encoded = EncodedModel(
        model,
        encoding,
        gpu.nvme_path,
        device_bytes=2 * LAYER_BYTES,
        host_bytes=384 << 10,
        accelerator=Accelerator(torch.device(gpu.device)),
        poison=poison,
    )
    try:
        assert_same_bits(expected, run(gpu, model))
        assert encoded.memory.stats()["device_evictions"] > 0
    finally:
        encoded.close()
