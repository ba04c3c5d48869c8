"""What is refused whatever the model, with what the message says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.fx.experimental.proxy_tensor import make_fx

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
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)(rows())
    finally:
        distributed.destroy_process_group()


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
        "the model without it, on one rank",
    ),
)
