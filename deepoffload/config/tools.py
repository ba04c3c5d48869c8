"""What a configuration says about watching a run and about its schedules of layers and data; DeepSpeed's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from deepoffload.schedules import sequence_length


@dataclass(frozen=True)
class FileMonitorConfig:
    """``tensorboard`` or ``csv_monitor``: a monitor that writes files."""

    enabled: bool = False
    output_path: str = ""
    """Where the folder ``job_name`` lies; empty: the working directory."""
    job_name: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass(frozen=True)
class CometConfig:
    """Comet. What is not said comes from Comet's own files and variables."""

    enabled: bool = False
    samples_log_interval: int = 100
    """Samples from one value of an event to the next."""
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = field(default=None, repr=False)
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


@dataclass(frozen=True)
class FlopsProfilerConfig:
    """Counts the operations of one step, by modules."""

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    """How often a backward runs the forward again, where the backward itself was not counted."""
    profile_step: int = 1
    """Updates made before the step."""
    module_depth: int = -1
    """Down to which depth modules are summed up by class; -1: to the innermost."""
    top_modules: int = 1
    """Classes shown for each depth."""
    detailed: bool = True
    """Show every module."""
    output_file: str | None = None
    """Where the table goes; ``None``: to standard output."""


@dataclass(frozen=True)
class LayerDropConfig:
    """Progressive layer drop: see ``deepoffload.schedules.layer_drop``."""

    enabled: bool = False
    theta: float = 1.0
    gamma: float = 0.001


@dataclass(frozen=True)
class CurriculumConfig:
    """Sequences that begin short: see ``deepoffload.schedules.sequence_length``."""

    enabled: bool = False
    curriculum_type: str = "seqlen"
    min_difficulty: int | None = None
    max_difficulty: int | None = None
    schedule_type: str | None = None
    total_curriculum_step: int | None = None
    difficulty_step: int | None = None
    root_degree: float | None = None
    difficulty: tuple[int, ...] = ()
    max_step: tuple[int, ...] = ()


@dataclass(frozen=True)
class AutotuningConfig:
    """What ``python -m deepoffload.estimate --tune`` is told; a program that trains does nothing with it."""

    enabled: bool = False
    metric: str = "throughput"
    max_train_batch_size: int | None = None
    min_train_batch_size: int = 1
    max_train_micro_batch_size_per_gpu: int = 1024
    min_train_micro_batch_size_per_gpu: int = 1
    num_tuning_micro_batch_sizes: int | None = None
    start_profile_step: int = 3
    end_profile_step: int = 5
    results_dir: str | None = None
    overwrite: bool = True


def curriculum_length(said: CurriculumConfig, step: int) -> int:
    """``schedules.sequence_length`` as a configuration says.

    Raises:
        UsageError: an argument is missing or out of range.
    """
    names = (part.name for part in dataclasses.fields(said) if part.name not in ("enabled", "curriculum_type"))
    return sequence_length(step, **{name: getattr(said, name) for name in names})
