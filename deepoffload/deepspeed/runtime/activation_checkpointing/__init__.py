"""``deepspeed.runtime.activation_checkpointing``."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("checkpointing",), "checkpointing")
