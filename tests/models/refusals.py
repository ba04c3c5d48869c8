"""What is refused for every model, with what the message says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from deepoffload import CPUAdamW
from deepoffload.errors import DeepOffloadError, UnsupportedError
from tests.support.models import rows


@dataclass(frozen=True)
class Refusal:
    """One line of the page: what somebody does, what they are told, and what to do instead."""

    what: str
    do: Callable[[Any], object]
    message: str
    instead: str
    error: type[DeepOffloadError] = UnsupportedError


def wrong_data(model: Any) -> None:
    model[0].weight.data = torch.zeros(3)


def trace_operations(model: Any) -> None:
    make_fx(model)(rows())


def data_parallel(model: Any) -> None:
    with one_rank():
        nn.parallel.DistributedDataParallel(model)(rows())


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def tensor_parallel(model: Any) -> None:
    with one_rank() as mesh:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})


def replicated(model: Any) -> None:
    with one_rank() as mesh:
        distribute_module(model, mesh)


def fully_sharded(model: Any) -> None:
    with one_rank() as mesh:
        fully_shard(model, mesh=mesh)


def optimizer_over_dtensors(model: Any) -> None:
    with one_rank() as mesh:
        CPUAdamW(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()).parameters())


SHARDED = "is paged and cannot be sharded"
KEEPS = "a paged parameter keeps its shape, dtype and device"

REFUSALS = (
    Refusal(
        "`model.half()`, `model.double()`, `model.to(dtype)`",
        nn.Module.half,
        KEEPS,
        "convert in the context, or set `precision`",
    ),
    Refusal(
        "`param.data =` a tensor of another shape or dtype; transformers' `resize_token_embeddings`",
        wrong_data,
        KEEPS,
        "in the context, or a new `nn.Parameter`",
    ),
    Refusal(
        "`model.to(device)`",
        lambda model: model.to("meta"),
        "a paged model stays on its device",
        "`copy.deepcopy(model)` is an ordinary model",
    ),
    Refusal(
        "`model.share_memory()`",
        nn.Module.share_memory,
        "a paged parameter's bytes come and go, other processes cannot share them",
        "share a copy",
    ),
    Refusal(
        "`torch.jit.trace`",
        lambda model: torch.jit.trace(model, rows()),
        "torch.jit.trace cannot record a paged model",
        "trace a copy",
    ),
    Refusal("`make_fx`", trace_operations, "make_fx cannot record a paged model", "trace a copy, or `torch.export`"),
    Refusal("`torch.jit.script`", torch.jit.script, "torch.jit.script cannot compile a paged model", "script a copy"),
    Refusal(
        "`DistributedDataParallel`",
        data_parallel,
        "DistributedDataParallel around a paged model would not average gradients",
        "the model without it, on any number of ranks",
    ),
    Refusal("`parallelize_module`", tensor_parallel, SHARDED, "the model as it is, or a copy"),
    Refusal("`distribute_module`, `distribute_tensor`", replicated, SHARDED, "the model as it is, or a copy"),
    Refusal("`fully_shard`, `FullyShardedDataParallel`", fully_sharded, SHARDED, "the model as it is, or a copy"),
    Refusal(
        "`CPUAdam` and the like over DTensors",
        optimizer_over_dtensors,
        "is a DTensor, whose bytes are in the tensors that it wraps",
        "torch's optimizers",
    ),
)
