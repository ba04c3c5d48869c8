"""``deepspeed.runtime.fp16``: its optimizers are not here."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("onebit",), "runtime.fp16")
