"""Sharding libraries take a model's parameters apart and put others in their place, which nothing would page. Wrappers
add up gradients that have landed elsewhere."""

from __future__ import annotations

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

_SHARDING = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed.fsdp")


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
