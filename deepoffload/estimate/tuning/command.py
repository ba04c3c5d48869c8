"""``python -m deepoffload.estimate --tune FILE``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepoffload.config import AccumulationOrder, Config, parse_config
from deepoffload.config.keys import AUTO
from deepoffload.config.resolve import may_use_nvme
from deepoffload.config.source import read_source
from deepoffload.device import Tier
from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.estimate.configuration import HIDDEN_KEYS
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.progress import Report
from deepoffload.estimate.subject import LENGTH, Subject
from deepoffload.estimate.tuning.candidates import Choices, micro_batches
from deepoffload.estimate.tuning.choice import MEMORY_SHARE, best
from deepoffload.estimate.tuning.model import ModelForm, possible
from deepoffload.estimate.tuning.prediction import CostModel
from deepoffload.estimate.tuning.table import TuningResult, as_json, as_text
from deepoffload.estimate.tuning.tuner import Tuner
from deepoffload.estimate.tuning.written import check_results_dir, program_lines, settings_of, write_results


@dataclass(frozen=True)
class Asked:
    """What a command asks for. ``base``: the configuration as it was given; ``config``: the same, checked."""

    base: Mapping[str, Any]
    config: Config
    model_path: str | None

    @classmethod
    def of(cls, options: argparse.Namespace, ranks: int) -> Asked:
        """``--tune`` names a configuration of a training, or one of a model (as ``--config`` does).

        Raises:
            ConfigError: no such file, settings that contradict each other, or no model.
        """
        path = Path(options.tune)
        said, _ = ({}, "") if path.is_dir() else read_source(options.tune)
        is_model = path.is_dir() or "model_type" in said or any(key in said for key in HIDDEN_KEYS)
        if is_model and (options.config or options.parameters or options.model):
            raise ConfigError(f"--tune {path} is a model's configuration: leave --config, --parameters and --model out")
        if options.precision and not is_model:
            raise ConfigError(f"--precision: {path} says it, or can: leave it out")
        base: dict[str, Any] = {"precision": options.precision or "bf16"} if is_model else dict(said)
        if options.host_budget is not None:
            base["host_budget"] = options.host_budget
        if options.nvme_budget is not None:
            base["nvme_budget"] = options.nvme_budget
        if options.measure:
            base["nvme_path"] = options.measure
        if options.train_batch_size is not None:
            base = {key: value for key, value in base.items() if key not in _BATCH_KEYS}
            base["train_batch_size"] = options.train_batch_size
        config = parse_config(_for_tuning(base), world_size=ranks)
        model_path = options.tune if is_model else options.config
        if not (model_path or options.parameters or options.model):
            raise ConfigError(
                f"--tune {path} says how to train: say the model, too, with --config PATH, --parameters, or --model "
                "FILE.py:FUNCTION for one of your own"
            )
        return cls(base, config, model_path)

    def batch(self, ranks: int) -> int:
        """Sequences per optimizer step on one rank.

        Raises:
            ConfigError: nothing says it, or it is outside of what ``autotuning`` allows.
        """
        tuning, whole = self.config.autotuning, self.config.train_batch_size
        whole = tuning.max_train_batch_size if whole is None else whole
        if whole is None:
            raise ConfigError(
                "tuning keeps the batch of a step, so it has to be known: say train_batch_size in the configuration, "
                "or --train-batch-size N"
            )
        if whole < tuning.min_train_batch_size or whole > (tuning.max_train_batch_size or whole):
            raise ConfigError(
                f"train_batch_size is {whole}, and autotuning allows from {tuning.min_train_batch_size} to "
                f"{tuning.max_train_batch_size or 'any'}: tuning keeps the batch of a step"
            )
        if whole % ranks:
            raise ConfigError(f"train_batch_size = {whole} cannot be divided by {ranks} processes")
        return whole // ranks


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _for_tuning(base: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` without what this command itself decides: its warnings are then about the rest."""
    said = {key: value for key, value in base.items() if not (key in _BATCH_KEYS and value == AUTO)}
    tuning = said.get("autotuning")
    if isinstance(tuning, Mapping) and tuning.get("enabled") is True:
        said["autotuning"] = {**tuning, "enabled": False}
    return said


def tune(
    options: argparse.Namespace,
    subject_of: Callable[[argparse.Namespace], Subject],
    machine_of: Callable[[argparse.Namespace], MachineSpec],
    progress: Report,
) -> tuple[TuningResult, str]:
    """The result, and its text for standard output.

    Args:
        subject_of, machine_of: as the other questions of the command find them.

    Raises:
        ConfigError, UnsupportedError: what is asked cannot be done. UsageError: the model cannot be run on shapes.
    """
    begun = time.monotonic()
    described = machine_of(options) if options.machine else None  # which measures nothing
    ranks = 1 if described is None else described.ranks
    asked = Asked.of(options, ranks)
    tuning = asked.config.autotuning
    _check(options, asked)
    options.config, options.measure = asked.model_path, next(iter(asked.config.nvme_path), None)
    if options.model:
        form = ModelForm(options.seq or LENGTH, function=options.model)
        subject = form.subject(1, checkpointing=False, tiled=False)
    else:
        subject = subject_of(options)
        form = ModelForm.of(subject, asked.model_path)
    check_results_dir(tuning.results_dir, overwrite=tuning.overwrite)
    batch = asked.batch(ranks)
    choices, notes = _choices(asked, form, batch, options)
    machine = described or machine_of(options)
    if machine.has_device or ranks > 1:
        choices = replace(choices, orders=(AccumulationOrder.HORIZONTAL,))
    memory = min(machine.host_memory_bytes, options.memory or machine.host_memory_bytes)
    planned = replace(machine, host_memory_bytes=int(memory * MEMORY_SHARE))
    model = CostModel(form, planned, asked.config, progress)
    runs = 0 if options.machine else options.runs
    rows = Tuner(model, choices, asked.base, tuning, runs, progress, memory_bytes=memory).rows()
    chosen = best(rows)
    settings: dict[str, Any] = {}
    program: list[str] = []
    if chosen is not None:
        settings = settings_of(asked.base, chosen.prediction, machine.ranks)
        program = program_lines(chosen.prediction, form)
    took_s = time.monotonic() - begun
    notes = (*asked.config.warnings, *subject.notes, *notes)
    if len(asked.config.nvme_path) > 1 and not options.machine:
        notes = (*notes, f"of the directories in nvme_path {asked.config.nvme_path[0]} alone was measured")
    name = f"{subject.name}, {form.length} tokens per sequence"
    result = TuningResult(
        name, batch * machine.ranks, rows, chosen, settings, tuple(program), tuning.metric, took_s, notes
    )
    return result, _written(result, tuning.results_dir, json_only=options.json)


def _written(result: TuningResult, directory: str | None, *, json_only: bool) -> str:
    report = as_json(result)
    files = [] if directory is None or result.chosen is None else write_results(directory, result.settings, report)
    if json_only:
        return json.dumps(report, indent=1)
    lines = [as_text(result)]
    if result.chosen is not None:
        lines += ["", json.dumps(result.settings, indent=2)]
    return "\n".join([*lines, *(f"written to {file}" for file in files)])


def _check(options: argparse.Namespace, asked: Asked) -> None:
    tuning = asked.config.autotuning
    if tuning.start_profile_step > tuning.end_profile_step:
        raise ConfigError(
            f"autotuning.start_profile_step = {tuning.start_profile_step} is after end_profile_step = "
            f"{tuning.end_profile_step}: no step would be timed"
        )
    if asked.config.inference:
        raise ConfigError("inference = true trains nothing: there is nothing to tune")
    if options.ranks and options.ranks > 1 and not options.machine:
        raise ConfigError(
            f"--tune runs one process, not {options.ranks}: describe the machine with --machine, and it predicts alone"
        )
    if not options.machine and asked.config.device != "cpu" and torch.accelerator.is_available():
        raise UnsupportedError(
            'this machine has an accelerator, and --tune measures the CPU alone: say device = "cpu" to train there, or '
            "describe the machine with --machine, and it predicts alone"
        )


def _choices(asked: Asked, form: ModelForm, batch: int, options: argparse.Namespace) -> tuple[Choices, tuple[str, ...]]:
    """What the configuration says is not varied, but for the micro-batch."""
    config, tuning = asked.config, asked.config.autotuning
    checkpointing, tiled, notes = possible(form)
    sizes = micro_batches(
        batch,
        tuning.min_train_micro_batch_size_per_gpu,
        tuning.max_train_micro_batch_size_per_gpu,
        tuning.num_tuning_micro_batch_sizes,
    )
    orders: tuple[AccumulationOrder, ...] = (AccumulationOrder.HORIZONTAL, AccumulationOrder.VERTICAL)
    if config.accumulation_order is not AccumulationOrder.AUTO:
        orders = (config.accumulation_order,)
    offload: tuple[Tier | None, ...] = (None,)
    if config.offloads_activations:
        offload = (config.offload_activations,)
    elif config.nvme_path and may_use_nvme(config):
        offload = (None, Tier.NVME)
    if options.checkpointing:
        checkpointing = tuple(value for value in checkpointing if value) or checkpointing
    return Choices(batch, sizes, checkpointing, tiled, orders, offload), notes
