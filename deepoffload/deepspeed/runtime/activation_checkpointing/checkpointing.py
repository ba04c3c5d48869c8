"""``deepspeed.runtime.activation_checkpointing.checkpointing``."""

from __future__ import annotations

from deepoffload.deepspeed.checkpointing import (
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)
from deepoffload.deepspeed.names import submodules

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

__getattr__ = submodules(__name__, (), "checkpointing")
