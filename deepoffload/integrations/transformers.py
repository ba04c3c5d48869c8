"""A DeepSpeed file and transformers' ``Trainer``, without the Trainer's argument ``deepspeed``::

    config = fill_auto("ds_config.json", args)
    with deepoffload.offload_context(config):
        model = AutoModelForCausalLM.from_pretrained(name)
    trainer = Trainer(model, args, train_dataset=data, optimizers=optimizers_of(config, model))

The Trainer accumulates, clips, saves and resumes as it does for a model without offloading. Under ``torchrun`` it
would wrap the model in DistributedDataParallel. With several ranks take one that does not::

    class RankTrainer(OnRanks, Trainer): ...

:class:`VerticalTrainer` is the Trainer that takes all micro-batches of a step through the model together, so that
weights are read once per step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from deepoffload.accumulation.accumulate import accumulate
from deepoffload.config import Config, parse_config
from deepoffload.config.keys import AUTO
from deepoffload.config.source import read_source
from deepoffload.deepspeed.curriculum import refuse_schedules
from deepoffload.deepspeed.optimizer_section import make_optimizer
from deepoffload.deepspeed.schedulers import make_schedule
from deepoffload.errors import ConfigError, UnsupportedError, UsageError
from deepoffload.integrations.accelerate import RankAccelerator
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
    refuse_schedules(parse_config(filled, world_size=args.world_size), "the Trainer")
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
    refuse_schedules(settings, "the Trainer")
    if settings.optimizer is None:
        if settings.scheduler is not None:
            raise ConfigError("scheduler without optimizer: say both, or leave both to the Trainer")
        return None, None
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise UsageError(f"all parameters of {type(model).__name__} are frozen: nothing can be trained")
    optimizer = make_optimizer(settings.optimizer, trained, model)
    schedule = None if settings.scheduler is None else make_schedule(optimizer, settings.scheduler)
    return optimizer, schedule


class OnRanks:
    """Goes before ``Trainer``, or a trainer that is derived from it, among the bases of a class: that one trains a
    paged model on several ranks, which add the gradients up themselves."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with :class:`deepoffload.integrations.accelerate.RankAccelerator`."""
        made: Any = super()
        made.create_accelerator_and_postprocess()
        # the Trainer makes it, and keeps methods of it: it stays the same one
        self.accelerator.__class__ = RankAccelerator


class HoldingAccelerator(RankAccelerator):
    """One that can keep the losses that a trainer calls backward of, for somebody else to do it.

    Attributes:
        held: the loss of each micro-batch that runs, scaled as for backward; None: backwards are done.
        running: the micro-batch whose ``training_step`` has called. Several of them run in one thread in turns.
    """

    held: dict[int, Tensor] | None = None
    running: ContextVar[int] = ContextVar("running")

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As accelerate's, or keep the loss.

        Raises:
            UnsupportedError: the optimizer updates inside backward, with the learning rate that it is given (LOMO); or
                it is the second backward of this micro-batch.
        """
        if self.held is None:
            super().backward(loss, **kwargs)
            return
        if kwargs:
            raise UnsupportedError(
                f"backward({', '.join(kwargs)}) while all micro-batches go through the model together: such an "
                "optimizer needs the Trainer itself"
            )
        number = self.running.get()
        if number in self.held:
            raise UnsupportedError(
                "training_step calls backward twice for one micro-batch while all of them go through the model "
                "together; call it once, of the sum of the losses, or use the Trainer itself"
            )
        loss = loss / self.gradient_accumulation_steps
        self.held[number] = loss if self.scaler is None else self.scaler.scale(loss)


class Vertical(OnRanks):
    """Goes before ``Trainer``, or a trainer that is derived from it, among the bases of a class: that one runs all
    micro-batches of a step with :func:`deepoffload.accumulate`, when the Trainer asks for the first of them.

    In which order is the configuration's ``accumulation_order``; the numbers are the same in each. Random numbers are
    those of :func:`deepoffload.accumulate`: each micro-batch has its own stream. ``training_step`` of the other bases
    runs for each micro-batch; what it calls backward of, once, is differentiated later.
    """

    _drawn: list[Any] | None = None
    _losses: list[Tensor] | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with :class:`HoldingAccelerator`."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = HoldingAccelerator

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's: the micro-batches of the next step, and the number of their items."""
        drawing: Any = super()
        samples, num_items = drawing.get_batch_samples(*args, **kwargs)
        self._drawn, self._losses = list(samples), None
        return samples, num_items

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a micro-batch. The first call of a step runs all of them.

        Raises:
            UsageError: these are not the inputs that the Trainer has drawn. Else what a micro-batch has raised.
        """
        if not self._drawn:  # nobody has drawn a step: it is called by itself
            alone: Any = super()
            loss: Tensor = alone.training_step(model, inputs, *args, **kwargs)
            return loss
        if inputs is not self._drawn[0]:
            raise UsageError(
                "training_step was given other inputs than the Trainer has drawn. Where a class changes them, put "
                "Vertical before it: class MyVerticalTrainer(Vertical, MyTrainer)"
            )
        if self._losses is None:
            self._losses = self._run(model, list(self._drawn), args, kwargs)
        self._drawn.pop(0)
        return self._losses.pop(0)

    def _run(self, model: nn.Module, samples: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Forward and backward of all micro-batches of a step; their losses as ``training_step`` returns them."""
        one: Any = super()
        losses: dict[int, Tensor] = {}
        held: dict[int, Tensor] = {}

        def loss_of(called: nn.Module, numbered: tuple[int, Any]) -> Tensor:
            number, inputs = numbered
            self.accelerator.running.set(number)
            losses[number] = one.training_step(called, inputs, *args, **kwargs)
            if number not in held:
                raise UnsupportedError(
                    f"training_step has not called backward for micro-batch {number}: where all micro-batches go "
                    "through the model together each has a loss; return one of zero with a graph, or use the Trainer "
                    "itself"
                )
            return held.pop(number)

        self.accelerator.held = held
        try:
            accumulate(model, enumerate(samples), loss_of, scale=False)
        finally:
            self.accelerator.held = None
        return [losses[number] for number in range(len(samples))]


class VerticalTrainer(Vertical, Trainer):
    """transformers' Trainer, with all micro-batches of a step together. See :class:`Vertical`."""


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
