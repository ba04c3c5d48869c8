"""What ranks give that cannot be trained with; and DistributedDataParallel, whose sums ours are compared with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import TensorDataset

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import DeepOffloadError, RankError, UnsupportedError
from tests.ranks.training_programs import digest
from tests.support.models import TinyGPT, batch, mlp, next_token_loss, rows


def rank() -> int:
    return int(os.environ["RANK"])


def built() -> nn.Module:
    torch.manual_seed(3)
    with offload_context(host_budget="32MiB"):
        return mlp()


def have_another_version() -> None:
    package = sys.modules["deepoffload"]
    said = package.__version__
    package.__version__ = f"{said}.{rank()}"
    try:
        built()
    finally:
        package.__version__ = said


def have_a_sharded_parameter() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with offload_context(host_budget="32MiB"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh))


def average_by_torch() -> None:
    nn.parallel.DistributedDataParallel(built())(rows())


def replicate_by_torch() -> None:
    replicate(built())(rows())


def replicate_a_layer() -> None:
    model = built()
    replicate(model[2])
    model(rows())


def replicate_a_layer_later() -> None:
    """The second call of a model is refused as the first one is."""
    model = built()
    model(rows())
    replicate(model[2])
    with suppress(UnsupportedError):
        model(rows())
    model(rows())


def build_around_a_wrapper() -> None:
    """On rank 1 alone: the other one is told."""
    with offload_context(host_budget="32MiB"):
        model = mlp()
        if rank():
            model[2] = nn.parallel.DistributedDataParallel(model[2], init_sync=False)


def take_over_a_wrapper() -> None:
    model = mlp()
    if rank():
        replicate(model[2])
    deepoffload.initialize(model=model, config={"host_budget": "32MiB"})


def take_over_what_is_sharded() -> None:
    model = mlp()
    model[2] = FullyShardedDataParallel(model[2], device_id=torch.device("cpu"))
    deepoffload.initialize(model=model, config={"host_budget": "32MiB"})


def take_over_dtensors() -> None:
    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))
    section = {"type": "AdamW", "params": {"lr": 1e-3}}
    deepoffload.initialize(model=model, config={"host_budget": "32MiB", "optimizer": section})


def bring_a_wrapper_later() -> None:
    model = built()
    model.append(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
    CPUAdamW(model.parameters(), lr=1e-2)


def compute_where_there_is_nothing() -> None:
    """Which of several devices is asked for, where there is none of that kind."""
    with offload_context(host_budget="32MiB", device="xpu"):
        mlp()


def shard_by_torch() -> None:
    fully_shard(built(), mesh=init_device_mesh("cpu", (2,)))


def shard_by_the_older_way() -> None:
    FullyShardedDataParallel(built(), device_id=torch.device("cpu"))


def update_other_parameters() -> None:
    model = built()
    optimizer = CPUAdamW(list(model.parameters())[rank() :], lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.step()


def use_another_optimizer() -> None:
    model = built()
    optimizer = (CPUAdamW, deepoffload.CPULion)[rank()](model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.step()


def give_one_rank(**given: Any) -> None:
    """Rank 1 says something else than rank 0 of which ranks train the model."""
    with offload_context(host_budget="32MiB", **(given if rank() else {"ranks": {"timeout_s": 5}})):
        mlp()


def give_a_mesh_of_two_dimensions() -> None:
    give_one_rank(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")))


def give_a_word_that_is_none() -> None:
    give_one_rank(ranks="lokal")


def give_a_group_and_none() -> None:
    give_one_rank(ranks="local", group=dist.group.WORLD)


def give_a_device_that_is_none() -> None:
    give_one_rank(device="gpu0")


def initialize_one_rank(**given: Any) -> None:
    """Rank 1 calls ``initialize`` with something else than rank 0."""
    config = {"host_budget": "32MiB", "ranks": {"timeout_s": 5}}
    deepoffload.initialize(**{"model": mlp(), "config": config, **(given if rank() else {})})


def give_one_rank_data() -> None:
    config = {"host_budget": "32MiB", "ranks": {"timeout_s": 5}, "train_micro_batch_size_per_gpu": 1}
    data = TensorDataset(torch.zeros(4, 8)) if rank() else None
    deepoffload.initialize(model=mlp(), config=config, training_data=data)


def give_two_configurations() -> None:
    initialize_one_rank(config_params={"host_budget": "32MiB"})


def give_no_model() -> None:
    initialize_one_rank(model=None)


def freeze_on_one_rank() -> None:
    """After a step. The first weight is frozen on both ranks, and only one has had a gradient of it since."""
    model = built()
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank() == 0:
        model(rows()).square().mean().backward()
    model[0].weight.requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
    model[2].weight.requires_grad_(rank() == 0)
    model(rows()).square().mean().backward()
    optimizer.step()


GIVEN: dict[str, Callable[[], None]] = {
    "version": have_another_version,
    "mesh": give_a_mesh_of_two_dimensions,
    "lokal": give_a_word_that_is_none,
    "local": give_a_group_and_none,
    "device": give_a_device_that_is_none,
    "two configurations": give_two_configurations,
    "no model": give_no_model,
    "data": give_one_rank_data,
    "no device": compute_where_there_is_nothing,
    "DTensor": have_a_sharded_parameter,
    "DistributedDataParallel": average_by_torch,
    "replicate": replicate_by_torch,
    "replicate inside": replicate_a_layer,
    "replicate inside, later": replicate_a_layer_later,
    "wrapped inside": build_around_a_wrapper,
    "wrapped inside, taken over": take_over_a_wrapper,
    "sharded inside, taken over": take_over_what_is_sharded,
    "sharded already, taken over": take_over_dtensors,
    "wrapped, later": bring_a_wrapper_later,
    "fully_shard": shard_by_torch,
    "FullyShardedDataParallel": shard_by_the_older_way,
    "other parameters": update_other_parameters,
    "frozen on one rank": freeze_on_one_rank,
    "another optimizer": use_another_optimizer,
}


def give_all() -> dict[str, str]:
    """What each of them is refused with."""
    dist.init_process_group("gloo")
    said = {}
    for name, give in GIVEN.items():
        try:
            give()
            said[name] = "nothing"
        except DeepOffloadError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def train_next_to_torch() -> tuple[list[float], list[float], list[str]]:
    """Two steps with ours and with DistributedDataParallel, in fp32. Returns the losses of both, and which gradients of
    the first step differ."""
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    plain = TinyGPT(dropout=0.0)
    torch.manual_seed(5)
    with offload_context(host_budget="64MiB") as context:
        ours = TinyGPT(dropout=0.0)
    wrapped = nn.parallel.DistributedDataParallel(plain)
    optimizers = [CPUAdamW(model.parameters(), lr=1e-3) for model in (ours, plain)]
    losses: tuple[list[float], list[float]] = ([], [])
    differing: list[str] = []
    for step in range(2):
        for model, found in zip((ours, wrapped), losses, strict=True):
            loss = next_token_loss(model, batch(10 * step + rank()))
            loss.backward()
            found.append(float(loss.detach()))
        if step == 0:
            differing = _differing(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with suppress(RankError):
        context.engine.close()
    return *losses, differing


def _differing(ours: nn.Module, plain: nn.Module) -> list[str]:
    def of(param: Tensor) -> str:
        assert param.grad is not None
        return digest(param.grad)

    theirs = dict(plain.named_parameters())
    return [name for name, param in ours.named_parameters() if of(param) != of(theirs[name])]
