"""``deepspeed.initialize`` as DeepSpeed has it: it also makes the process group that scripts then use."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepoffload.deepspeed.comm import TORCH_DISTRIBUTED_DEFAULT_PORT, init_distributed, is_initialized
from deepoffload.deepspeed.initialization import config_source, paging_engine, set_up
from deepoffload.errors import ConfigError
from deepoffload.runtime.ranks import RankChoice


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    group: Any = None,
    mesh: Any = None,
    ranks: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """:func:`deepoffload.initialize`, after :func:`init_distributed`.

    As in DeepSpeed, a model that every rank has built for itself gets the values of rank 0: its parameters, and its
    buffers, too.

    Args:
        group, mesh, ranks: as there.
        dist_init_required: None: make a process group unless there is one. False: make none; with one process none is
            needed.

    Raises:
        ConfigError: nothing says a configuration, and the model was not built in a context that has one.
    """
    if config_source(args, config, config_params) is None and isinstance(model, nn.Module):
        if paging_engine(model) is None:
            raise ConfigError(
                "deepspeed.initialize has no configuration: pass config= (a dict or the path of a JSON file), or args "
                "with --deepspeed_config; deepoffload.initialize works without one"
            )
    if not is_initialized() and dist_init_required is not False:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    return set_up(
        RankChoice(group, mesh, ranks, values_of_rank_0=True),
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
    )
