"""``deepspeed.comm``: torch's process groups by DeepSpeed's names. These groups are the program's; the engine has
its own.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepoffload.deepspeed.accelerator import get_accelerator
from deepoffload.deepspeed.names import AbsentNameError
from deepoffload.errors import UsageError

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=30)

_OWN_ARGUMENTS = ("prof", "log_name", "debug")
"""Of DeepSpeed's functions, in addition to torch's: they are for its logger of communication."""

_PASSED_ON = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single "
    "barrier batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather get_global_rank irecv "
    "isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_tensor scatter send get_backend "
    "is_nccl_available is_mpi_available".split()
)
_TYPES = ("ReduceOp", "P2POp", "ProcessGroup", "GroupMember")
_RENAMED = {
    "inference_all_reduce": "all_reduce",
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
}
_KEYWORDS = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
}
"""Arguments that DeepSpeed calls otherwise than torch, by torch's function."""
_NOT_HERE = {
    "log_summary": "communication is not logged; torch.profiler shows it",
    "initialize_mesh_device": "all ranks are data-parallel; torch.distributed.device_mesh makes meshes",
    **dict.fromkeys(
        "configure get_comm_operation_count get_logged_comm_ops has_comm_data reset_log timed_op".split(),
        "communication is not logged; torch.profiler shows it",
    ),
    **dict.fromkeys(
        "all_gather_coalesced enable_symm_mem_for_group has_all_gather_into_tensor has_all_reduce_coalesced "
        "has_coalescing_manager has_reduce_scatter_tensor init_deepspeed_backend set_backend".split(),
        "there is no backend between torch.distributed and the program",
    ),
    **dict.fromkeys(
        "in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend".split(),
        "torchrun sets the environment on every cloud",
    ),
    "mpi_discovery": "start the processes with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
}


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group, unless there is one.

    A process that no launcher has started gets a group of its own with one rank: it needs no port.

    Args:
        dist_backend: torch's name; None: that of the device, with gloo for tensors on the CPU.
        distributed_port: where a launcher has said no ``MASTER_PORT``.
        timeout: the limit of every call in the group. ``DEEPSPEED_TIMEOUT`` in the environment, in minutes, sets
            another default.
        dist_init_required: False: a group has to be there.
        auto_mpi_discovery, verbose, config: accepted; there is nothing for them to say.
        rank, world_size: with ``init_method``, where no launcher says them.

    Raises:
        UsageError: no group is there, and ``dist_init_required`` is False; or a launcher has said only a part of what
            is needed.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError(
            "dist_init_required=False, and there is no process group: call torch.distributed.init_process_group before"
        )
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is DEFAULT_TIMEOUT and minutes:
        timeout = timedelta(minutes=_whole("DEEPSPEED_TIMEOUT", minutes))
    name = get_accelerator().communication_backend_name()
    backend = dist_backend or ("gloo" if name == "gloo" else f"cpu:gloo,{get_accelerator().device_name()}:{name}")
    if dist_backend == "nccl" and not dist.is_nccl_available():
        raise UsageError(
            'init_distributed(dist_backend="nccl"): this torch has no NCCL, so it is the one for CPUs; leave '
            "dist_backend out, which takes what the device needs"
        )
    if init_method is not None:
        dist.init_process_group(backend, init_method, timeout, world_size, rank)
    elif "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        _from_launcher(backend, timeout, distributed_port)
    elif world_size > 1:
        raise UsageError(
            f"init_distributed(world_size={world_size}) needs init_method, such as tcp://host:port; or start the "
            "processes with torchrun"
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _from_launcher(backend: str, timeout: timedelta, port: int) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise UsageError(f"init_distributed: the environment has no {missing[0]}; start the processes with torchrun")
    rank, size = (_whole(name, os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if "MASTER_ADDR" not in os.environ:
        raise UsageError("init_distributed: the environment has no MASTER_ADDR; start the processes with torchrun")
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', port)}"
    dist.init_process_group(backend, where, timeout, size, rank)


def _whole(name: str, said: str) -> int:
    if not said.isdecimal():
        raise UsageError(f"{name}={said} in the environment is no whole number")
    return int(said)


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def is_available() -> bool:
    """Whether torch can make process groups."""
    return dist.is_available()


def get_rank(group: Any = None) -> int:
    """The number of this process; -1 where it is not part of ``group``."""
    _need_group("get_rank")
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many processes there are."""
    _need_group("get_world_size")
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """The number of this process on its host, as the launcher says; 0 for a process that none has started."""
    _need_group("get_local_rank")
    return _whole("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all processes."""
    _need_group("get_world_group")
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group's members in the default group."""
    _need_group("get_all_ranks_from_group")
    return dist.get_process_group_ranks(get_world_group() if group is None else group)


def _need_group(name: str) -> None:
    if not is_initialized():
        raise UsageError(f"deepspeed.comm.{name}: there is no process group; call deepspeed.init_distributed() before")


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return getattr(dist, name)
    if name in _PASSED_ON or name in _RENAMED:
        return _without_own_arguments(name)
    if name in _NOT_HERE:
        raise AbsentNameError(f"deepspeed.comm.{name} is not in deepoffload: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; torch.distributed may have it")


def _without_own_arguments(name: str) -> Any:
    function = getattr(dist, _RENAMED.get(name, name))
    keywords = _KEYWORDS.get(function.__name__, {})

    def passed_on(*args: Any, **kwargs: Any) -> Any:
        _need_group(name)
        given = {keywords.get(key, key): value for key, value in kwargs.items() if key not in _OWN_ARGUMENTS}
        return function(*args, **given)

    passed_on.__name__ = name
    passed_on.__doc__ = f"``torch.distributed.{function.__name__}``; prof, log_name and debug are accepted."
    return passed_on
