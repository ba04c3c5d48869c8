"""What the user asked for: read, checked and explained."""

from __future__ import annotations

from deepoffload.config.as_written import as_written, key_of
from deepoffload.config.parse import TOOL_SECTIONS, TRAINING_FIELDS, parse_config
from deepoffload.config.schema import (
    ActivationMode,
    AioBackend,
    AioConfig,
    Buffers,
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
from deepoffload.schedule.cost_model import AccumulationOrder, StepOverlap

__all__ = [
    "AccumulationOrder",
    "ActivationMode",
    "AioBackend",
    "AioConfig",
    "CheckpointConfig",
    "Buffers",
    "Config",
    "DebugConfig",
    "Fp16Config",
    "GradientDtype",
    "OptimizerConfig",
    "Precision",
    "RanksConfig",
    "SchedulerConfig",
    "StepOverlap",
    "TOOL_SECTIONS",
    "TRAINING_FIELDS",
    "as_written",
    "key_of",
    "parse_config",
]
