"""Sharding libraries take a model's parameters apart and put others in their place, which nothing would page."""

from __future__ import annotations

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import door_frame

_SHARDING = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed.fsdp")


def refuse_sharding(name: str) -> None:
    """Raise when a door is asked by code that makes DTensors or FSDP's shards of parameters. To be called by handlers.

    Raises:
        UnsupportedError: the caller is such code.
    """
    if door_frame(2).f_globals.get("__name__", "").startswith(_SHARDING):
        raise UnsupportedError(
            f"{name} is paged and cannot be sharded (parallelize_module, fully_shard, FullyShardedDataParallel, "
            "DTensor): a DTensor in its place would be outside of the budget and of paging. Use the paged model as it "
            "is, on one rank, or shard a copy (copy.deepcopy(model))"
        )
