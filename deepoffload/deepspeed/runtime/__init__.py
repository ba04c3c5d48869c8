"""``deepspeed.runtime``: what scripts import from DeepSpeed's inner modules."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

_MODULES = (
    *("activation_checkpointing", "bf16_optimizer", "config", "dataloader", "engine", "fp16", "hybrid_engine"),
    *("lr_schedules", "pipe", "sequence_parallel", "utils", "zero"),
)

__getattr__ = submodules(__name__, _MODULES, "runtime")
