"""A candidate as people write it: JSON of our keys and DeepSpeed's, and what a program has to do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepoffload.config import AccumulationOrder
from deepoffload.errors import ConfigError
from deepoffload.estimate.tuning.choice import Prediction
from deepoffload.estimate.tuning.model import ModelForm

OPTIMAL, TABLE = "ds_config_optimal.json", "candidates.json"
"""Files in the results' directory; the first has DeepSpeed's name."""

_NOT_RUN = (
    "scheduler", "tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "progressive_layer_drop",
    "curriculum_learning", "durability", "timeline", "steps_per_print", "wall_clock_breakdown",
)  # fmt: skip
"""Keys of which some steps with random weights need nothing: they watch, or follow a long training."""


def settings_of(base: Mapping[str, Any], found: Prediction, ranks: int) -> dict[str, Any]:
    """``base``, a configuration as it was given, with a candidate's settings."""
    candidate = found.candidate
    told: dict[str, Any] = {key: value for key, value in base.items() if key != "autotuning"}
    told |= {
        "train_batch_size": candidate.micro_batch * candidate.accumulation * ranks,
        "train_micro_batch_size_per_gpu": candidate.micro_batch,
        "gradient_accumulation_steps": candidate.accumulation,
        "host_budget": found.host_budget_bytes,
    }
    if candidate.accumulation > 1:
        told["accumulation_order"] = candidate.order.value
    else:
        told.pop("accumulation_order", None)
    if candidate.offload_activations is not None:
        told["offload_activations"] = candidate.offload_activations.value
    return told


def settings_to_run(base: Mapping[str, Any], found: Prediction, accumulation: int) -> dict[str, Any]:
    """The same for a run on one rank with fewer micro-batches in a step, and with an optimizer."""
    told = {key: value for key, value in settings_of(base, found, 1).items() if key not in _NOT_RUN}
    durability = base.get("durability")
    if isinstance(durability, Mapping) and durability.get("path"):
        told["nvme_path"] = durability["path"]
    told["gradient_accumulation_steps"] = accumulation
    told["train_batch_size"] = found.candidate.micro_batch * accumulation
    told.setdefault("optimizer", {"type": "AdamW"})
    if accumulation == 1:
        told["accumulation_order"] = AccumulationOrder.HORIZONTAL.value
    return told


def program_lines(found: Prediction, form: ModelForm) -> list[str]:
    """What the program does in addition to the configuration."""
    candidate = found.candidate
    by_transformers, own = bool(form.path), form.function
    lines = []
    if candidate.checkpointing:
        way = "model.gradient_checkpointing_enable()" if by_transformers else "torch.utils.checkpoint around each layer"
        way = f"{own}(checkpointing=True)" if own else way
        lines.append(f"checkpointing: {way}")
    else:
        lines.append("no activation checkpointing")
    if candidate.tiled_loss:
        way = "deepoffload.tile_loss(model)" if by_transformers else "deepoffload.tiled_loss(hidden, head, targets)"
        way = f"{own}(tiled_loss=True)" if own else way
        lines.append(f"the loss in tiles: {way}")
    if candidate.is_vertical:
        lines.append("micro-batches in vertical order: engine.train_batch(...) or deepoffload.accumulate(...)")
    return lines


def check_results_dir(directory: str | None, *, overwrite: bool) -> None:
    """Raises ``ConfigError`` where results cannot be written, before anything is measured."""
    if directory is None:
        return
    folder = Path(directory)
    there = [name for name in (OPTIMAL, TABLE) if (folder / name).exists()]
    if there and not overwrite:
        raise ConfigError(
            f"autotuning.results_dir {directory} has {there[0]} already, and autotuning.overwrite is false: name "
            "another directory, or allow it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"autotuning.results_dir {directory}: {error.strerror}; name another one") from error


def write_results(directory: str, settings: Mapping[str, Any], report: Mapping[str, Any]) -> list[Path]:
    """The settings and the table, each as a file that is there whole or not at all."""
    written = []
    for name, what in ((OPTIMAL, settings), (TABLE, report)):
        path = Path(directory) / name
        fresh = path.with_name(f".{name}.new")
        try:
            fresh.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise ConfigError(f"autotuning.results_dir: {path}: {error.strerror}") from error
        written.append(path)
    return written
