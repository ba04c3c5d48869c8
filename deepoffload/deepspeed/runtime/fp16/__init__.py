"""``deepspeed.runtime.fp16``: its optimizers are not here."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"), "runtime.fp16")
