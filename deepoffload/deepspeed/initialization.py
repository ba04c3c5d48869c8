"""``deepoffload.initialize``: model, optimizer, data and schedule in, DeepSpeed's 4-tuple out."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from deepoffload.config import TOOL_SECTIONS, TRAINING_FIELDS, Config, Precision, StepOverlap, key_of, parse_config
from deepoffload.deepspeed.data import compare_data, make_loader, split_over_ranks
from deepoffload.deepspeed.engine import TrainingEngine
from deepoffload.deepspeed.optimizer_section import listed_parameters, make_optimizer
from deepoffload.deepspeed.schedulers import make_schedule
from deepoffload.deepspeed.tools import check_tools
from deepoffload.deepspeed.utils.groups import refuse_cut_models
from deepoffload.errors import BudgetError, ConfigError, UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.handles import handle_of
from deepoffload.optim.loss_scale import configured_loss_scale
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.torch_compiler import leave_to_python
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.announce import warn_of_settings
from deepoffload.runtime.construct import give_back
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.rank_facts import refuse_distributed, refuse_dtensors
from deepoffload.runtime.ranks import RankChoice

log = logging.getLogger("deepoffload")

DEFAULT_GRADIENT_CLIPPING = 1.0
"""DeepSpeed's default; a plain loop does not clip unless it is asked to."""

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_TRAINING_KEYS = (*TRAINING_FIELDS, *TOOL_SECTIONS, "optimizer", "scheduler", "fp16")
"""What may be said when the model has been built already."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    ranks: str | Mapping[str, Any] | None = None,
) -> tuple[TrainingEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Make a training engine, with DeepSpeed's arguments.

    Args:
        args: an object whose ``deepspeed_config`` names the configuration file (see :func:`add_config_arguments`).
        model: built inside :class:`deepoffload.offload_context`, or an ordinary one on the CPU, which is taken over:
            its parameters stay the same objects.
        optimizer: a torch optimizer over the model's parameters, or a function from parameters to one. None: as the
            configuration's ``optimizer`` says; without one the engine only infers.
        model_parameters: parameters or groups for the optimizer; None: all that require gradients.
        training_data: a dataset; the loader draws micro-batches from it in random order. With several ranks each draws
            its share, by a ``DistributedSampler``: call ``loader.sampler.set_epoch(epoch)`` for another order in each
            epoch.
        lr_scheduler: a scheduler, or a function from the optimizer to one. None: as the configuration says.
        distributed_port, dist_init_required: accepted; the launcher says where ranks meet, and the default group is
            started where nobody has.
        mpu: Megatron's, if it says that no layer is cut between ranks. mesh_param: only None.
        collate_fn: for the loader.
        config: path, mapping or :class:`Config`. None for a model built in a context: that context's configuration.
            When both are given, what concerns placement has to agree, and the rest may be said in either.
        config_params: older name of ``config``.
        group, mesh, ranks: as for :class:`deepoffload.offload_context`, which says them for a model built in it.

    Returns:
        ``(engine, optimizer, loader, lr_scheduler)``; the last three are None where there is none. The engine clips
        gradients to a global norm of 1.0 when nothing is said.

    Raises:
        ConfigError, UsageError, UnsupportedError: before the model is touched.
        BudgetError, PlacementError: the budgets cannot hold it; a model that cannot be placed is as it was before.
    """
    return set_up(
        RankChoice(group, mesh, ranks),
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


def set_up(
    choice: RankChoice,
    *,
    args: Any,
    model: nn.Module | None,
    optimizer: Any,
    model_parameters: Any,
    training_data: Any,
    lr_scheduler: Any,
    mpu: Any,
    collate_fn: Any,
    config: ConfigSource | None,
    mesh_param: Any,
    config_params: ConfigSource | None,
) -> tuple[TrainingEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """:func:`initialize` on the ranks of ``choice``."""
    core = paging_engine(model) if isinstance(model, nn.Module) else None
    if core is not None and choice.is_said:
        raise UsageError(
            "initialize: the model was built in an offload_context, which says its ranks (group, mesh, ranks)"
        )
    world_size = choice.world_size if core is None else core.ranks.world_size
    with choice.telling("initialize()") if core is None else nullcontext():
        model = _checked_model(model, mpu, mesh_param)
        source = config_source(args, config, config_params)
        settings = parse_config(source, world_size=world_size, **choice.settings)
        if core is not None:
            warn_of_settings(settings)  # the engine has said those of its own configuration
            settings = core.config if source is None else combine(core.config, settings)
        else:
            refuse_dtensors(model)  # an optimizer would say only that it cannot update them
        clipping = _clipping(settings, optimizer)
        _check_before(settings, model, optimizer, model_parameters, lr_scheduler, training_data)
        built = _optimizer(settings, model, optimizer, model_parameters, clipping)
        scheduler = _scheduler(settings, built, lr_scheduler)
        loader = make_loader(settings, training_data, collate_fn)
    if core is None:  # last: what fails before leaves the model as it was
        core = take_over(settings, model, choice, loader)
        _tell_pager(built)
    else:
        compare_data(core, loader)
    loader = split_over_ranks(loader, core, settings, collate_fn)
    if built is None:
        log.info("initialize: no optimizer, so the engine only infers")
    if optimizer is not None:
        settings = dataclasses.replace(settings, optimizer=None)  # its section is not used
    scale = configured_loss_scale(settings.fp16) if settings.precision is Precision.FP16 else None
    return TrainingEngine(model, core, settings, built, scheduler, clipping, scale, loader), built, loader, scheduler


leave_to_python(set_up, "a model is paged, and its optimizer made, in Python")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser, whose result :func:`initialize` takes as ``args``."""
    group = parser.add_argument_group("deepoffload", "configuration (the names are DeepSpeed's)")
    group.add_argument("--deepspeed", action="store_true", help="for scripts that ask whether to use the engine")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON file with DeepSpeed's keys, ours, or both")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)  # its first names
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser


def take_over(config: Config, model: nn.Module, choice: RankChoice, loader: DataLoader[Any] | None = None) -> Engine:
    """Page a model that was built before. One that cannot be placed is left as it was. ``loader``: of its data."""
    core = Engine(config, choice.open(config))
    try:
        compare_data(core, loader)
        with core.agreement.together("placing the model"):
            refuse_distributed([model])
        core.adopt_model(model)
    except BaseException as error:
        adopted = [(p, p.__dict__["_slot"]) for p in model.parameters() if isinstance(p, OffloadedParameter)]
        if isinstance(error, (BudgetError, UsageError)) and all(handle.unit is None for _, handle in adopted):
            for _, handle in adopted:
                give_back(handle)
        core.close(f"initialize() failed with {type(error).__name__}")
        raise
    return core


def page(config: Config, model: nn.Module) -> Engine:
    """The engine of a model that was built in a context; one that was not is taken over, with the values of rank 0."""
    core = paging_engine(model)
    return take_over(config, model, RankChoice(values_of_rank_0=True)) if core is None else core


def _tell_pager(optimizer: torch.optim.Optimizer | None) -> None:
    """An optimizer was made before its parameters were paged: their pager knows it from now on, as it knows others."""
    if isinstance(optimizer, HostOptimizer):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            handle = handle_of(param)
            if handle is not None:
                handle.pager.held.updates(optimizer, handle)


# -- configuration ---------------------------------------------------------------------------------------------------


def paging_engine(model: nn.Module) -> Engine | None:
    """The engine of a model built in a context; None for an ordinary model."""
    if not any(isinstance(param.__dict__.get("_slot"), ParamHandle) for param in model.parameters()):
        return None
    engine = engine_of(model)
    if engine.pager.life.closed_because is not None:
        engine.pager.life.refuse_closed(type(model).__name__)
    if engine.pager.gradients is None:
        raise UsageError("initialize() inside offload_context: call it after the context has ended")
    return engine


def config_source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource | None:
    """What the arguments of ``initialize`` say; None where they say nothing. Raises ConfigError: several of them do."""
    if isinstance(args, Mapping):
        raise UsageError(
            "initialize(args=...) takes what a parser gives, with the attribute deepspeed_config; pass a mapping of "
            "settings as config="
        )
    said = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),  # its first name
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"initialize was given {' and '.join(given)}; give one of them")
    return next(iter(given.values()), None)


def combine(context: Config, said: Config) -> Config:
    """The configuration of a model built under ``context`` when ``initialize`` is given ``said``.

    Raises:
        ConfigError: both say something, and not the same; or ``said`` has a key that came too late.
    """
    defaults = Config()
    changes: dict[str, Any] = {}
    batch = _differing(said, defaults, _BATCH_KEYS)
    if batch and _differing(context, defaults, _BATCH_KEYS) and _differing(said, context, _BATCH_KEYS):
        name = _differing(said, context, _BATCH_KEYS)[0]
        raise _conflict(name, getattr(context, name), getattr(said, name))
    if batch:
        changes.update({name: getattr(said, name) for name in _BATCH_KEYS})
    for field in dataclasses.fields(Config):
        name = field.name
        before, now = getattr(context, name), getattr(said, name)
        if name in (*_BATCH_KEYS, "notes", "warnings") or now == getattr(defaults, name) or now == before:
            continue
        if name not in _TRAINING_KEYS or before != getattr(defaults, name):
            raise _conflict(name, before, now)
        changes[name] = now
    return dataclasses.replace(context, **changes)


def _differing(one: Config, other: Config, names: Iterable[str]) -> list[str]:
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _conflict(name: str, before: object, now: object) -> ConfigError:
    return ConfigError(
        f"{key_of(name)}: the model was built in an offload_context with {before!r}, and initialize() was given "
        f"{now!r}; say it the same in both, or only in offload_context (zero.Init takes it as config_dict_or_path)"
    )


def _clipping(config: Config, optimizer: Any) -> float:
    """Largest global norm; 0.0 is off. One of ours that clips already keeps its own."""
    own = optimizer.max_grad_norm if isinstance(optimizer, HostOptimizer) else None
    said = config.gradient_clipping
    if own is not None and said is not None and own != said:
        raise ConfigError(f"gradient_clipping = {said}, but the optimizer has max_grad_norm = {own}; leave one out")
    clipping = own if own is not None else DEFAULT_GRADIENT_CLIPPING if said is None else float(said)
    if clipping and config.step_overlap is StepOverlap.IN_BACKWARD:
        asked = f"max_grad_norm = {own}" if own is not None else f"gradient_clipping = {said}"
        what = "initialize() clips to 1.0" if own is None and said is None else f"{asked} asks for it"
        raise ConfigError(f'step_overlap = "in_backward" cannot clip, and {what}; set gradient_clipping to 0')
    return clipping


def _checked_model(model: nn.Module | None, mpu: Any, mesh_param: Any) -> nn.Module:
    """The model of ``initialize``. Raises UsageError, UnsupportedError: it is none, or one that is cut."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}")
    if mpu is not None:
        refuse_cut_models("initialize", mpu)
    if mesh_param is not None:
        raise UnsupportedError("initialize: model parallelism (mesh_param) is not available; leave it out")
    return model


def _check_before(
    config: Config, model: nn.Module, optimizer: Any, model_parameters: Any, lr_scheduler: Any, training_data: Any
) -> None:
    """Everything that can be wrong with the arguments, while the model is still as it was."""
    has_optimizer = optimizer is not None or config.optimizer is not None
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise UsageError(
            f"initialize(optimizer=...) takes an optimizer or a function giving one, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_fp16(config, optimizer)
    if isinstance(optimizer, torch.optim.Optimizer) and model_parameters is not None:
        log.info("initialize: model_parameters are not used, because the optimizer has its own")
    if (lr_scheduler is not None or config.scheduler is not None) and not has_optimizer:
        raise UsageError("initialize: a schedule needs an optimizer; pass one, or say optimizer in the configuration")
    if lr_scheduler is not None and not callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        raise UsageError(
            f"initialize(lr_scheduler=...) takes a schedule or a function giving it, not {type(lr_scheduler).__name__}"
        )
    if has_optimizer and not isinstance(optimizer, torch.optim.Optimizer) and model_parameters is None:
        if not any(param.requires_grad for param in model.parameters()):
            raise UsageError(f"initialize: all parameters of {type(model).__name__} are frozen: nothing can be trained")
    check_tools(config, model)
    if training_data is not None and config.train_micro_batch_size_per_gpu is None:
        raise ConfigError("initialize(training_data=...) needs train_micro_batch_size_per_gpu (or train_batch_size)")


def _check_fp16(config: Config, optimizer: torch.optim.Optimizer) -> None:
    if config.precision is Precision.FP16 and not isinstance(optimizer, HostOptimizer):
        raise UsageError(
            f"initialize with fp16: {type(optimizer).__module__}.{type(optimizer).__name__} keeps no fp32 masters, and "
            "small updates and unscaled gradients are lost in fp16; use an optimizer of deepoffload (CPUAdamW, ...), "
            "or bf16"
        )


def _check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise for an optimizer that would train nothing of the model."""
    mine = {id(param) for param in model.parameters()}
    if not any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
        raise UsageError(
            f"initialize: no parameter of the optimizer is one of the {type(model).__name__}: was it made for another "
            "model? Make it from model.parameters()"
        )


def _check_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise for a schedule of another optimizer. (One of a wrapper has its groups, too.)"""
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if isinstance(groups, list) and not any(theirs is mine for theirs in groups for mine in optimizer.param_groups):
        raise UsageError(
            "initialize(lr_scheduler=...): the schedule belongs to another optimizer than the one that trains; pass a "
            "function that makes it: lr_scheduler=lambda optimizer: ..."
        )


# -- the parts -------------------------------------------------------------------------------------------------------


def _optimizer(
    config: Config, model: nn.Module, given: Any, model_parameters: Any, clipping: float
) -> torch.optim.Optimizer | None:
    if given is not None and config.optimizer is not None:
        log.warning("initialize: the optimizer passed in is used, the configuration's optimizer section is not")
    if given is None and config.optimizer is None:
        return None
    if isinstance(given, torch.optim.Optimizer):
        built = given
    else:
        trained = (param for param in model.parameters() if param.requires_grad)
        params = listed_parameters(trained if model_parameters is None else model_parameters)
        if given is None:
            built = make_optimizer(config.optimizer, params, model)  # type: ignore[arg-type]  # one of both is there
        else:
            built = given(params)
        if not isinstance(built, torch.optim.Optimizer):
            raise UsageError(f"the function passed as optimizer gave {type(built).__name__}, not a torch optimizer")
        _check_fp16(config, built)
    _check_parameters(built, model)
    if isinstance(built, HostOptimizer):
        built.skip_non_finite = config.step_overlap is not StepOverlap.IN_BACKWARD  # it sees no gradient twice
        if built.max_grad_norm is None and clipping > 0:
            built.max_grad_norm = clipping
    elif isinstance(built, (torch.optim.Adam, torch.optim.AdamW)):
        log.info(
            "%s works on paged parameters exactly, but keeps its state in memory and updates slowly; "
            "deepoffload.CPUAdamW keeps the state within the budget",
            type(built).__name__,
        )
    return built


def _scheduler(config: Config, optimizer: torch.optim.Optimizer | None, given: Any) -> Any:
    if optimizer is None:
        return None
    if given is not None:
        if config.scheduler is not None:
            log.warning("initialize: the schedule passed in is used, the configuration's scheduler section is not")
        schedule = given if hasattr(given, "step") else given(optimizer)
        _check_schedule(schedule, optimizer)
        return schedule
    return None if config.scheduler is None else make_schedule(optimizer, config.scheduler)
