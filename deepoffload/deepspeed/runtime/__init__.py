"""``deepspeed.runtime``: what scripts import from DeepSpeed's inner modules."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

_MODULES = ("activation_checkpointing", "config", "dataloader", "engine", "fp16", "lr_schedules", "utils", "zero")

__getattr__ = submodules(__name__, _MODULES, "runtime")
