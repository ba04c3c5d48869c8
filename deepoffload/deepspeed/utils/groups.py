"""``deepspeed.utils.groups``: the groups of a run in which all ranks are data-parallel."""

from __future__ import annotations

from typing import Any

from deepoffload.deepspeed import comm
from deepoffload.deepspeed.names import submodules


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


_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_model_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = _get_expert_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank

__getattr__ = submodules(__name__, (), "utils.groups")
