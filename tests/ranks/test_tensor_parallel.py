"""Tensor parallelism next to paging: shards as ordinary parameters train, DTensors infer, all else is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import deepoffload
from deepoffload import CPUAdamW, offload_context, stats
from deepoffload.errors import UnsupportedError
from tests.models.refusals import one_rank
from tests.ranks import tensor_parallel as programs
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import TIGHT, Paging, plain
from tests.support.rank_processes import values_of

ORDER = r"train with ranks=\"local\".*as an ordinary parameter.*parallelize_module before the layers come into"
"""The order of calls that works."""


def test_shards_that_are_ordinary_parameters_train(tmp_path: Path) -> None:
    for found in values_of(programs.train_shards, 2, str(tmp_path / "store"), str(tmp_path)):
        assert found["parameters"] == 4 * (2 * 128 * 64 + 2 * 64)
        assert found["evictions"] > 0


def test_sharded_models_infer_by_their_local_shards(tmp_path: Path) -> None:
    """On two ranks, each of which has half of each weight; and the bias of the second layer, which is replicated."""
    for found, said in values_of(programs.infer_sharded, 2, str(tmp_path / "store"), str(tmp_path)):
        assert found["parameters"] == 4 * (4 * 64 * 64 + 2 * 64 + 64)
        assert found["evictions"] > 0
        for text in said.values():
            assert "is a DTensor: a model that is sharded already can be paged for inference only" in text, said


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_one_rank_refuses_them_from_every_side(paging: Paging, frozen: bool) -> None:
    """In the context, given to it, and after it: the sentence names the order of calls that works; nothing changes."""
    plan = {"2": ColwiseParallel(output_layouts=Replicate())}

    def sharded(mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(mlp(), mesh, plan).requires_grad_(not frozen)

    def inside(layers: nn.Module) -> None:
        with offload_context(host_budget="8MiB"):
            nn.Sequential(*layers)  # type: ignore[misc]

    def built_inside(mesh: DeviceMesh) -> None:
        with offload_context(host_budget="8MiB"):
            parallelize_module(mlp(), mesh, plan)

    expected = program(plain(mlp))
    model = paging.build(mlp, TIGHT)
    before = stats(model)["parameters"]
    layer = model[2]
    with one_rank() as mesh:
        gone = sharded(mesh)

        def replaced() -> None:
            model[2] = sharded(mesh)[2]  # type: ignore[index]
            model(rows())

        ways: list[Callable[[], object]] = [
            lambda: built_inside(mesh),
            lambda: inside(sharded(mesh)),
            lambda: deepoffload.initialize(model=sharded(mesh), config={"host_budget": "8MiB"}),
            lambda: parallelize_module(model, mesh, plan),
            lambda: distribute_tensor(layer.weight, mesh, [Shard(0)]),
            replaced,
        ]
        for way in ways:
            with pytest.raises(UnsupportedError, match=ORDER):
                way()
            model[2] = layer
    with pytest.raises(UnsupportedError, match=ORDER):  # the mesh is gone
        inside(gone)
    assert stats(model)["parameters"] == before
    assert_same_bits(expected, program(model))


def program(model: nn.Module) -> Any:
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = model(rows(seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, weights_of(model)


@torch.no_grad()
def test_one_rank_infers_with_a_mesh_that_is_gone_later(paging: Paging) -> None:
    """What plain PyTorch does then: its numbers, or its error."""

    def outcome(model: nn.Module) -> Any:
        try:
            return model(rows())
        except (RuntimeError, ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"

    with one_rank() as mesh:
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
        twin = parallelize_module(plain(mlp), mesh, plan)
        expected = twin(rows())
        layers = parallelize_module(plain(mlp), mesh, plan)
        with offload_context(host_budget="96KiB", nvme_path=str(paging.nvme_path), inference=True):
            model = nn.Sequential(*layers)  # type: ignore[misc]
        assert_same_bits(expected, model(rows()))
        assert stats(model)["parameters"] == sum(param.numel() for param in mlp().parameters())
    assert_same_bits(outcome(twin), outcome(model))


def test_initialize_leaves_a_sharded_model_as_it_was() -> None:
    """Ordinary layers among DTensors, too."""
    with one_rank() as mesh:
        sharded = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
        for model in (nn.Sequential(sharded), nn.Sequential(nn.Linear(8, 8), sharded)):
            kinds = {type(param) for param in model.parameters()}
            with pytest.raises(UnsupportedError, match=r"weight is a DTensor.*can be paged for inference only"):
                deepoffload.initialize(model=model, config={"host_budget": "4MiB"})
            assert {type(param) for param in model.parameters()} == kinds and model(torch.ones(1, 8)).shape == (1, 8)
