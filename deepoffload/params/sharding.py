"""Sharding libraries take a model's parameters apart and put others in their place, which nothing would page. Wrappers
add up gradients that have landed elsewhere."""

from __future__ import annotations

from torch import nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import door_frame

NO_WRAPPER = (
    "DistributedDataParallel around a paged model would not average gradients: use the model without it, on any number "
    "of ranks (docs/ranks.md; docs/trainers.md for transformers' Trainer and accelerate). Where it was built with "
    'ranks="local", name the ranks that train it, too, with group= or mesh= instead'
)

HOW_TO_SHARD = (
    'Data-parallel ranks partition a model as it is built. For tensor parallelism, train with ranks="local", each '
    "rank's shard (weight.to_local()) as an ordinary parameter, and a forward that communicates; for inference, call "
    "parallelize_module before the layers come into the offload_context (docs/ranks.md)"
)

_WRAPPING = "torch.distributed.utils"
"""Where a wrapper has the values of rank 0 sent to all. It takes all weights at once, which a small budget does not
hold: its error would come before ours, and say something else."""

_FSDP = ("torch.distributed.fsdp",)

_SHARDING = ("torch.distributed.tensor", "torch.distributed._tensor", *_FSDP)

_AVERAGING = ("torch.nn.parallel.distributed", "torch.distributed._composable.replicate")
"""Where the classes of modules come from whose gradients torch averages. ``replicate()`` makes a class for each."""


def refuse_wrapped(root: nn.Module, name: str = "") -> None:
    """Raise when ``root`` or a module in it is one of those that :func:`refuse_sharding` refuses to make: it was made
    before there was anything paged in it. ``name``: of ``root``.

    Raises:
        UnsupportedError: the message names the module.
    """
    for path, module in root.named_modules(prefix=name):
        made_by = [kind.__module__ for kind in type(module).__mro__]
        where = f"{path or 'the model'} is {{}} ({type(module).__name__})"
        if any(place.startswith(_FSDP) for place in made_by):
            raise UnsupportedError(
                f"{where.format('sharded already')}: its weights would come and go outside of the budget, without "
                f"paging. Take it without fully_shard or FullyShardedDataParallel. {HOW_TO_SHARD}"
            )
        if any(place.startswith(_AVERAGING) for place in made_by):
            raise UnsupportedError(f"{where.format('wrapped')}. {NO_WRAPPER}")


def refuse_sharding(name: str) -> None:
    """Raise when a door is asked by code that makes DTensors or FSDP's shards of parameters, or that wraps a model. To
    be called by handlers.

    Raises:
        UnsupportedError: the caller is such code.
    """
    caller = door_frame(2).f_globals.get("__name__", "")
    if caller == _WRAPPING:
        raise UnsupportedError(NO_WRAPPER)
    if caller.startswith(_SHARDING):
        raise UnsupportedError(
            f"{name} is paged and cannot be sharded (parallelize_module, fully_shard, FullyShardedDataParallel, "
            "DTensor): a DTensor in its place would be outside of the budget and of paging. Shard a copy "
            f"(copy.deepcopy(model)), or use it as it is. {HOW_TO_SHARD}"
        )
