"""A DeepSpeed file and transformers' ``Trainer``, without the Trainer's argument ``deepspeed``::

    config = fill_auto("ds_config.json", args)
    with deepoffload.offload_context(config):
        model = AutoModelForCausalLM.from_pretrained(name)
    trainer = Trainer(model, args, train_dataset=data, optimizers=optimizers_of(config, model))

The Trainer accumulates, clips, saves and resumes as it does for a model without offloading. Under ``torchrun`` it
would wrap the model in DistributedDataParallel. With several ranks take one that does not::

    class RankTrainer(OnRanks, Trainer): ...
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.config import Config, parse_config
from deepoffload.config.keys import AUTO
from deepoffload.config.source import read_source
from deepoffload.deepspeed.initialization import make_optimizer
from deepoffload.deepspeed.schedulers import make_schedule
from deepoffload.errors import ConfigError, UsageError
from deepoffload.runtime.ranks import RankChoice

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


def fill_auto(config: ConfigSource, args: Any, *, num_training_steps: int | None = None) -> dict[str, Any]:
    """The configuration with ``args`` in the place of each ``"auto"`` that stands for an argument of the Trainer.

    Every other ``"auto"`` is left out. The rules are those of transformers' ``HfTrainerDeepSpeedConfig``.

    Args:
        config: path of a file with DeepSpeed's keys, ours or both, or a mapping of these. It is not changed.
        args: ``TrainingArguments``, made without ``deepspeed``.
        num_training_steps: length of the run, where the schedule's is ``"auto"`` and ``args.max_steps`` says none.

    Raises:
        ConfigError: a value of the file differs from that of ``args``; all that do are named. Or the file is wrong.
        UsageError: ``args`` has ``deepspeed``.
    """
    if getattr(args, "deepspeed", None):
        raise UsageError(
            "TrainingArguments(deepspeed=...) makes the Trainer call DeepSpeed itself; leave it out, and give the same "
            "file to fill_auto and offload_context"
        )
    mapping, where = read_source(config)
    filled: dict[str, Any] = copy.deepcopy(mapping)
    differing = [
        f"{path} = {said!r}, but {name} = {value!r}"
        for path, value, name in _arguments(args, num_training_steps)
        if (said := _fill(filled, path.split("."), value)) is not None and name and said != value
    ]
    if differing:
        raise ConfigError(
            f"{f'configuration {where}: ' if where else ''}not what TrainingArguments say: {'; '.join(differing)}; "
            'say "auto" in the file, which takes what they say'
        )
    filled = _without_auto(filled)
    parse_config(filled, world_size=args.world_size)
    return filled


def optimizers_of(
    config: ConfigSource | Config, model: nn.Module
) -> tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None]:
    """What ``Trainer(optimizers=...)`` takes: the optimizer and the schedule that the configuration names, as DeepSpeed
    makes them of it: over all parameters that are trained, in one group.

    Where it names no optimizer, the Trainer makes its own, whose state stays in memory. Where it names no schedule, the
    Trainer makes the one of its arguments.

    Raises:
        ConfigError: the configuration is wrong, or has a schedule without an optimizer. UsageError: nothing is trained.
    """
    settings = parse_config(config, world_size=RankChoice().world_size)
    if settings.optimizer is None:
        if settings.scheduler is not None:
            raise ConfigError("scheduler without optimizer: say both, or leave both to the Trainer")
        return None, None
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise UsageError(f"all parameters of {type(model).__name__} are frozen: nothing can be trained")
    optimizer = make_optimizer(settings.optimizer, trained)
    schedule = None if settings.scheduler is None else make_schedule(optimizer, settings.scheduler)
    return optimizer, schedule


class OnRanks:
    """Goes before ``Trainer``, or a trainer that is derived from it, among the bases of a class: that one trains a
    paged model on several ranks, which add the gradients up themselves."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with :class:`deepoffload.integrations.accelerate.RankAccelerator`."""
        from deepoffload.integrations.accelerate import (
            RankAccelerator,
        )  # here: the Trainer needs it, and this module not

        made: Any = super()
        made.create_accelerator_and_postprocess()
        self.accelerator.__class__ = (
            RankAccelerator  # the Trainer makes it, and keeps methods of it: it stays the same one
        )


def _arguments(args: Any, num_training_steps: int | None) -> Iterator[tuple[str, Any, str]]:
    """Paths, what ``args`` says of each, and the name of the argument: a value of the file has to be the same. Without
    a name it need not."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    yield "train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"
    yield "gradient_accumulation_steps", steps, "gradient_accumulation_steps"
    yield "train_batch_size", micro * steps * args.world_size, "train_batch_size (calculated)"
    yield "gradient_clipping", args.max_grad_norm, "max_grad_norm"
    yield "optimizer.params.lr", args.learning_rate, "learning_rate"
    yield "optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "[adam_beta1, adam_beta2]"
    yield "optimizer.params.eps", args.adam_epsilon, "adam_epsilon"
    yield "optimizer.params.weight_decay", args.weight_decay, "weight_decay"
    yield "scheduler.params.warmup_min_lr", 0, ""
    yield "scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate"
    yield "fp16.enabled", bool(args.fp16 or args.fp16_full_eval), "fp16"
    yield "bf16.enabled", bool(args.bf16 or args.bf16_full_eval), "bf16"
    length = num_training_steps if num_training_steps is not None else args.max_steps
    if length > 0:
        yield "scheduler.params.total_num_steps", length, "num_training_steps"
        yield "scheduler.params.warmup_num_steps", max(1, args.get_warmup_steps(length)), "warmup_steps"


def _fill(node: dict[str, Any], path: list[str], value: Any) -> Any:
    """Put ``value`` in the place of ``"auto"``. Returns another value that stands there, or None."""
    *sections, name = path
    for section in sections:
        node = node.get(section)  # type: ignore[assignment]
        if not isinstance(node, dict):
            return None
    said = node.get(name)
    if said == AUTO:
        node[name] = value
        return None
    return list(said) if isinstance(said, tuple) else said


def _without_auto(node: dict[str, Any]) -> dict[str, Any]:
    """Without what nobody has filled in, but for a schedule's own parameters: without a length it cannot be made."""
    return {
        key: _without_auto(value) if isinstance(value, dict) and key != "scheduler" else value
        for key, value in node.items()
        if value != AUTO
    }
