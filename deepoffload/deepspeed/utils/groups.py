"""``deepspeed.utils.groups``: the groups of a run in which all ranks are data-parallel."""

from __future__ import annotations

from typing import Any

from deepoffload.deepspeed import comm
from deepoffload.deepspeed.names import submodules
from deepoffload.errors import UnsupportedError


def get_data_parallel_world_size() -> int:
    """How many processes train together."""
    return comm.get_world_size() if comm.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """Which of them this is."""
    return comm.get_rank() if comm.is_initialized() else 0


def get_data_parallel_group() -> Any:
    """The group of all of them; None without a process group."""
    return comm.get_world_group() if comm.is_initialized() else None


def get_model_parallel_world_size() -> int:
    """1: no layer is cut between ranks."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


def refuse_cut_models(call: str, mpu: Any) -> None:
    """Accept Megatron's ``mpu`` where it says that no layer is cut between ranks: scripts pass it in any case.

    Raises:
        UnsupportedError: it says something else, or nothing.
    """
    names = [f"get_{kind}_parallel_world_size" for kind in ("model", "tensor_model", "pipeline_model", "sequence")]
    sizes = {name: int(getattr(mpu, name)()) for name in names if callable(getattr(mpu, name, None))}
    if not sizes:
        raise UnsupportedError(
            f"{call}(mpu=...): all ranks are data-parallel, and this object says nothing; leave it out"
        )
    for name, size in sizes.items():
        if size != 1:
            raise UnsupportedError(
                f"{call}(mpu=...): {name}() is {size}, and model parallelism is not available: all ranks are "
                "data-parallel. What does not fit on the device is in host memory and on NVMe"
            )


_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_model_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = _get_expert_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank

__getattr__ = submodules(__name__, (), "utils.groups")
