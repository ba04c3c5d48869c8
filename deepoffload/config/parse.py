"""``parse_config``: everything the user may hand over becomes one checked :class:`Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from deepoffload.config.autos import auto_warning
from deepoffload.config.collect import KEYS, Layer, check, shown
from deepoffload.config.keys import AUTO
from deepoffload.config.lr_schedules import SCHEDULES, TORCH_SCHEDULES
from deepoffload.config.optimizers import OPTIMIZERS, TORCHS_WEIGHT_DECAY
from deepoffload.config.schema import (
    AioConfig,
    CheckpointConfig,
    Config,
    DebugConfig,
    Fp16Config,
    GradientDtype,
    OptimizerConfig,
    Precision,
    RanksConfig,
    SchedulerConfig,
)
from deepoffload.config.several_ranks import check_several_ranks
from deepoffload.config.source import read_source
from deepoffload.config.tools import (
    AutotuningConfig,
    CometConfig,
    CurriculumConfig,
    FileMonitorConfig,
    FlopsProfilerConfig,
    LayerDropConfig,
    WandbConfig,
    curriculum_length,
)
from deepoffload.device import Tier
from deepoffload.errors import ConfigError, UsageError
from deepoffload.schedule.cost_model import StepOverlap

TRAINING_FIELDS = (
    "gradient_clipping",
    "dataloader_drop_last",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_stage",
    "load_universal",
    "decoupled_saves",
    "tag_validation",
)
TOOL_SECTIONS: Mapping[str, type] = {
    "tensorboard": FileMonitorConfig,
    "csv_monitor": FileMonitorConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
    "flops_profiler": FlopsProfilerConfig,
    "progressive_layer_drop": LayerDropConfig,
    "curriculum_learning": CurriculumConfig,
    "autotuning": AutotuningConfig,
}
"""Sections about the training loop alone: watching it, and its schedules of layers and data."""

"""What of a configuration, next to its sections, concerns the training loop alone."""

_GRADIENT_DTYPES = ("gradient_dtype", "data_types.grad_accum_dtype")
"""Two keys about one thing: a keyword for one of them wins over a file's for the other."""


def parse_config(
    source: str | os.PathLike[str] | Mapping[str, object] | Config | None = None,
    *,
    world_size: int = 1,
    **overrides: object,
) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a JSON file (DeepSpeed's keys, ours, or both), a dict of the same, a ``Config``, or nothing.
        overrides: keys as keywords, which win over ``source``; a nested one is a dict (``aio={"backend": "pool"}``).
            ``None`` takes back what ``source`` says.
        world_size: how many ranks train together.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or range, keys that contradict each other, or a key that
            cannot be ignored without changing numbers. The message names the key by its dotted path.
    """
    mapping, file_name = read_source(source)
    where = f"configuration {file_name}: " if file_name else ""
    base = Layer(where).collect(mapping)
    top = Layer("", strict=True).collect(overrides)
    fields = _merge(base.fields, {**dict.fromkeys(_taken_back(base, top)), **top.fields})
    notes, warnings = (source.notes, source.warnings) if isinstance(source, Config) else ((), ())
    config = _build(fields, tuple(dict.fromkeys((*notes, *base.notes, *top.notes))), where, world_size)
    warned = [*warnings, *base.warnings, *_path_warnings(base, top, config)]
    said_before = () if isinstance(source, Config) else base.autos  # a Config has its warning
    if config.autotuning.enabled and not isinstance(source, Config):
        warned.append(
            f"{where}autotuning.enabled: nothing is tuned in a program that trains, and the settings stay as they are: "
            f"`python -m deepoffload.estimate --tune {file_name or 'FILE'} --config MODEL` (or --model "
            "FILE.py:FUNCTION, for a model of your own) chooses better ones before it (docs/estimators.md)"
        )
    autos = [path for path in (*said_before, *top.autos) if not _said(path, top)]
    if autos:
        warned.append(auto_warning(autos, config, where))
    return replace(config, warnings=tuple(dict.fromkeys(warned)))


def _taken_back(base: Layer, top: Layer) -> list[str]:
    """Fields of ``base`` that ``top`` takes back without a value of its own for them."""
    taken_back = top.takes_back(base)
    if any(top.fields.get(name) is not None for name in _GRADIENT_DTYPES):
        taken_back += _GRADIENT_DTYPES
    return taken_back


def _said(path: str, layer: Layer) -> bool:
    """Whether ``layer`` gives a value for ``path``."""
    section, _, name = path.rpartition(".")
    within = layer.fields.get(section)
    if isinstance(within, dict):
        return within.get(name, AUTO) not in (AUTO, None)
    key = KEYS.get(path)
    return key is not None and key.field is not None and layer.fields.get(key.field) is not None


def _merge(base: dict[str, object], top: dict[str, object]) -> dict[str, Any]:
    """``top`` over ``base``, without what is not said. A new schedule type brings its own parameters."""
    merged = dict(base)
    if top.get("scheduler.type") is not None:
        merged.pop("scheduler.params", None)
    elif isinstance(top.get("scheduler.params"), dict):
        earlier = cast("dict[str, object]", merged.get("scheduler.params") or {})
        top = {**top, "scheduler.params": {**earlier, **cast("dict[str, object]", top["scheduler.params"])}}
    merged.update(top)
    return {name: value for name, value in merged.items() if value is not None}


def _build(fields: dict[str, Any], notes: tuple[str, ...], where: str, world_size: int) -> Config:
    simple = (
        "device",
        "device_budget",
        "host_budget",
        "memory_may_grow",
        "nvme_budget",
        "offload_param",
        "offload_optimizer",
        "step_overlap",
        "accumulation_order",
        "activations",
        "offload_activations",
        "activation_budget",
        "offload_activations_above",
        "prefetch",
        "inference",
        "timeline",
        "precision",
        "buffers",
        "keep_fp32",
        "gradient_dtype",
        *TRAINING_FIELDS,
    )
    fp16 = Fp16Config(**_below("fp16", fields))
    if fields.get("precision") is not Precision.FP16 and fp16 != Fp16Config():
        notes = tuple(dict.fromkeys((*notes, "fp16: inapplicable: loss scaling belongs to fp16, which is off")))
    durability = fields.get("durability") or None  # False is what switches it off above a file
    config = Config(
        **{name: fields[name] for name in simple if name in fields},
        **_batch_triple(fields, where, world_size),
        nvme_path=(durability.path if durability is not None else ()) or _nvme_path(fields),
        durability=durability,
        optimizer=_optimizer(fields, where),
        scheduler=_scheduler(fields, where),
        fp16=fp16,
        **_tools(fields),
        aio=AioConfig(**_below("aio", fields)),
        checkpoint=CheckpointConfig(**_below("checkpoint", fields)),
        ranks=RanksConfig(**_below("ranks", fields)),
        debug=DebugConfig(**_below("debug", fields)),
        notes=notes,
    )
    config = replace(config, gradient_dtype=_gradient_dtype(config, fields, where))
    _check_together(config, fields, where)
    if world_size > 1:
        check_several_ranks(config, fields, where, world_size)
        if config.zero_stage == 0:
            taken = "zero_optimization.stage = 0: mapped: taken as 1: optimizer state is partitioned over the ranks"
            config = replace(config, zero_stage=1, notes=tuple(dict.fromkeys((*config.notes, taken))))
    return config


def _gradient_dtype(config: Config, fields: dict[str, Any], where: str) -> GradientDtype:
    """Our key, or DeepSpeed's, which names a dtype where ours says "as the weights"."""
    own, theirs = (fields.get(name) for name in _GRADIENT_DTYPES)
    if own is None or theirs is None:
        return GradientDtype.FP32 if theirs is Precision.FP32 else config.gradient_dtype
    if theirs is not (Precision.FP32 if own is GradientDtype.FP32 else config.precision):
        raise ConfigError(
            f"{where}{' and '.join(_GRADIENT_DTYPES)} contradict each other ({shown(own)} and {shown(theirs)}); leave "
            "one out"
        )
    return config.gradient_dtype


def _below(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    prefix = section + "."
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _batch_triple(fields: dict[str, Any], where: str, world_size: int) -> dict[str, Any]:
    """DeepSpeed's rule: train_batch_size = micro x accumulation x world; two of them give the third."""
    train = fields.get("train_batch_size")
    micro = fields.get("train_micro_batch_size_per_gpu")
    steps = fields.get("gradient_accumulation_steps")
    if train is not None:
        if micro is None:
            micro = _quotient(where, train, steps or 1, world_size, "gradient_accumulation_steps")
        if steps is None:
            steps = _quotient(where, train, micro, world_size, "train_micro_batch_size_per_gpu")
        if train != micro * steps * world_size:
            raise ConfigError(
                f"{where}train_batch_size = {train} is not train_micro_batch_size_per_gpu = {micro} x "
                f"gradient_accumulation_steps = {steps} x processes = {world_size}; leave one of the three out"
            )
    elif micro is not None:
        train = micro * (steps or 1) * world_size
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps or 1,
    }


def _tools(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: section(**_below(name, fields)) for name, section in TOOL_SECTIONS.items()}


def _check_curriculum(config: Config, where: str) -> None:
    said = config.curriculum_learning
    if not said.enabled:
        return
    for name in ("min_difficulty", "max_difficulty", "schedule_type"):
        if getattr(said, name) is None:
            raise ConfigError(f"{where}curriculum_learning.{name} has to be said where it is enabled")
    try:
        curriculum_length(said, 0)
    except UsageError as error:
        raise ConfigError(f"{where}curriculum_learning: {error}") from None


def _quotient(where: str, train: int, part: int, world_size: int, name: str) -> int:
    if train % (part * world_size):
        raise ConfigError(
            f"{where}train_batch_size = {train} cannot be divided by {name} = {part} x processes = {world_size}"
        )
    return train // (part * world_size)


def _nvme_path(fields: dict[str, Any]) -> tuple[str, ...]:
    """Ours where it is said; else the paths of DeepSpeed's two offload sections, each once."""
    theirs = (*fields.get("nvme_path.offload_param", ()), *fields.get("nvme_path.offload_optimizer", ()))
    return tuple(fields.get("nvme_path", tuple(dict.fromkeys(theirs))))


def _path_warnings(base: Layer, top: Layer, config: Config) -> Iterator[str]:
    """Where DeepSpeed's two sections name other directories than those that weights and state both go to."""
    if top.fields.get("nvme_path") is not None:
        return  # a keyword, which is to win
    used = set(config.nvme_path)
    own = base.fields.get("nvme_path") is not None or config.path_key != "nvme_path"
    differing = []
    for name in ("nvme_path.offload_param", "nvme_path.offload_optimizer"):
        layer = base if top.fields.get(name) is None else top
        paths = cast("tuple[str, ...]", layer.fields.get(name) or ())
        if paths and (not set(paths) <= used if own else set(paths) != used):
            differing.append(f"{layer.origin[name]} = {shown(paths[0] if len(paths) == 1 else paths)}")
    if differing:
        what = "weights and optimizer state both go to both; nvme_path can name directories for everything"
        yield f"{base.where}{' and '.join(differing)}: {f'not used, because {config.path_key} is set' if own else what}"


def _optimizer(fields: dict[str, Any], where: str) -> OptimizerConfig | None:
    kind = fields.get("optimizer.type")
    said = _below("optimizer.params", fields)
    if kind is None:
        if said:
            raise ConfigError(f'{where}optimizer.params without optimizer.type; say "Adam" or "AdamW"')
        return None
    known = OPTIMIZERS[kind]
    torchs_adam = kind in ("adam", "adamw", "muon") and said.pop("torch_adam", False)
    for name in said:
        if name not in known.defaults and name not in known.others:
            names = ", ".join((*known.defaults, *known.others))
            raise ConfigError(f"{where}optimizer.params.{name}: {kind} has no such parameter; it has {names}")
    params = {**known.defaults, **said}
    if kind == "adamw":
        params["adamw_mode"] = True
    if torchs_adam and params.get("adamw_mode") and "weight_decay" not in said:
        params["weight_decay"] = TORCHS_WEIGHT_DECAY
    return OptimizerConfig(kind, params)


def _scheduler(fields: dict[str, Any], where: str) -> SchedulerConfig | None:
    kind = fields.get("scheduler.type")
    said = fields.get("scheduler.params", {})
    if kind is None:
        if said:
            raise ConfigError(f"{where}scheduler.params without scheduler.type; say one of {', '.join(SCHEDULES)}")
        return None
    if kind in TORCH_SCHEDULES:
        return SchedulerConfig(kind, dict(said))
    known = SCHEDULES[kind]
    params: dict[str, object] = {name: parameter.default for name, parameter in known.items()}
    for name, raw in said.items():
        path = f"{where}scheduler.params.{name}"
        if name not in known:
            raise ConfigError(f"{path}: {kind} has no such parameter; it has {', '.join(known)}")
        if raw == AUTO and name == "warmup_max_lr":
            params[name] = None  # the optimizer's own rate, which is what Hugging Face fills in
        elif raw == AUTO and known[name].required:
            params[name] = AUTO  # refused where a schedule is built of it: the program may pass its own
        elif raw is not None and raw != AUTO:
            params[name] = check(known[name].kind, raw, path)
    for name, parameter in known.items():
        if parameter.required and params[name] is None:
            raise ConfigError(f"{where}scheduler.params.{name}: {kind} needs it; expected {parameter.kind.expected}")
    return SchedulerConfig(kind, params)


def _check_together(config: Config, fields: dict[str, Any], where: str) -> None:
    """What no single key can be blamed for."""
    if config.durability is not None and not config.nvme_path:
        raise ConfigError(
            f"{where}durability without nvme_path: say in which directory the state lies, with nvme_path or "
            'durability = {"path": ...}'
        )
    if config.durability is not None and config.nvme_budget == 0:
        raise ConfigError(f"{where}durability with nvme_budget = 0: it needs disk space; leave nvme_budget out")
    _check_activations(config, where)
    trains = [name for name in ("optimizer", "scheduler", "durability") if getattr(config, name) is not None]
    if config.inference and trains:
        raise ConfigError(f"{where}inference = true trains nothing: leave {' and '.join(trains)} out, or inference")
    if config.precision is Precision.FP16 and config.step_overlap is StepOverlap.IN_BACKWARD:
        raise ConfigError(
            f'{where}precision is fp16, and step_overlap = "in_backward" uses each gradient before it is known whether '
            'another one overflows; use step_overlap = "deferred", or bf16'
        )
    if config.step_overlap is StepOverlap.SPECULATIVE and config.durability is not None:
        raise ConfigError(
            f'{where}step_overlap = "speculative" is not available with durability: a durable step would have to know '
            'which extents are certain; use step_overlap = "deferred"'
        )
    scales = config.precision is Precision.FP16 and not config.fp16.loss_scale
    _check_curriculum(config, where)
    for name in ("loss_scale_window", "min_loss_scale"):
        if scales and getattr(config.fp16, name) < 1:  # else nothing asks for it, and DeepSpeed does not look, either
            raise ConfigError(f"{where}fp16.{name} = 0: expected a whole number of at least 1: the scale is dynamic")
    first = 2.0**config.fp16.initial_scale_power
    if scales and config.fp16.min_loss_scale > first:
        raise ConfigError(
            f"{where}fp16.min_loss_scale = {config.fp16.min_loss_scale} is above the first scale, 2 to the power of "
            f"fp16.initial_scale_power = {config.fp16.initial_scale_power}"
        )
    for name, others in (("grad_accum_dtype", (Precision.FP32,)), ("param_dtype", ())):
        dtype = fields.get(f"data_types.{name}")
        if dtype is not None and dtype not in (config.precision, *others):
            raise ConfigError(
                f"{where}data_types.{name} = {shown(dtype)}: ignoring it would change numbers: precision is "
                f"{shown(config.precision)}; set precision (or bf16.enabled) to the same dtype, or leave this out"
                f"{' (gradients accumulate in that or in fp32)' if others else ''}"
            )
    for name in ("offload_param", "offload_optimizer", "offload_activations"):
        if getattr(config, name) is Tier.NVME and not config.nvme_path:
            raise ConfigError(f"{where}{name} is nvme, but there is no nvme_path; say which directory to swap to")
    if config.nvme_budget and not config.nvme_path:
        raise ConfigError(f"{where}nvme_budget without nvme_path; say which directory to swap to")


def _check_activations(config: Config, where: str) -> None:
    """The keys of activation offload among each other."""
    if not config.offloads_activations:
        for name in ("activation_budget", "offload_activations_above"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f'{where}{name} without offload_activations; say offload_activations = "nvme" or "host"'
                )
        return
    if config.inference:
        raise ConfigError(f"{where}inference = true keeps nothing for backward: leave offload_activations out")
    if config.offload_activations is Tier.NVME and config.nvme_budget == 0:
        raise ConfigError(f"{where}offload_activations is nvme with nvme_budget = 0: it needs disk space")
