"""Tensor parallel layers of two processes: shards as ordinary parameters in training, DTensors in inference."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import UnsupportedError
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import rows
from tests.support.rank_processes import own_group

WIDTH, DEPTH = 64, 4
BUDGET = "160KiB"


class _Copied(torch.autograd.Function):
    """The input of a layer whose outputs are cut: backward adds up what the ranks give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Added(torch.autograd.Function):
    """The output of a layer whose inputs are cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class MegatronMlp(nn.Module):
    """Half of an MLP: its first layer is cut by outputs, its second one by inputs."""

    def __init__(self) -> None:
        super().__init__()
        half = 4 * WIDTH // 2
        self.up = nn.Parameter(torch.randn(half, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, half) / 8)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(F.linear(_Copied.apply(self.norm(x)), self.up))
        return x + _Added.apply(F.linear(inner, self.down))


def build() -> nn.Module:
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Sequential(*[MegatronMlp() for _ in range(DEPTH)])


def train(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(5):
        loss = model(rows(seed=step)).square().mean()
        loss.backward()
        seen += [loss.detach(), gradients_of(model)]
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights_of(model)


def train_shards(file: str, path: str) -> dict[str, float]:
    own_group(file)
    expected = train(build())
    with offload_context(host_budget=BUDGET, nvme_path=path, ranks="local", debug={"poison": True}):
        model = build()
    assert_same_bits(expected, train(model))
    dist.barrier()
    return deepoffload.stats(model)


def sharded(mesh: DeviceMesh) -> list[nn.Module]:
    """Layers of DTensors, with the same values on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return [parallelize_module(layer, mesh, plan) for layer in layers]


def refused(mesh: DeviceMesh, **said: Any) -> str:
    layers = sharded(mesh)
    try:
        with offload_context(host_budget=BUDGET, **said):
            nn.Sequential(*layers)
    except UnsupportedError as error:
        return str(error)
    return "nothing"


@torch.no_grad()
def infer_sharded(file: str, path: str) -> tuple[dict[str, float], dict[str, str]]:
    """DTensors are paged by their local shards; elsewhere they are refused."""
    own_group(file)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = nn.Sequential(*sharded(mesh))
    expected = [plain(rows(seed=seed)) for seed in range(3)]
    said = {
        "training": refused(mesh, nvme_path=path, ranks="local"),
        "all ranks": refused(mesh, nvme_path=path, inference=True),
    }
    layers = sharded(mesh)
    with offload_context(host_budget=BUDGET, nvme_path=path, ranks="local", inference=True, debug={"poison": True}):
        model = nn.Sequential(*layers)
    assert_same_bits(expected, [model(rows(seed=seed)) for seed in range(3)])
    assert type(model[0][0].weight) is DTensor and not [p for p in model.parameters() if isinstance(p, DTensor)]
    dist.barrier()
    return deepoffload.stats(model), said
