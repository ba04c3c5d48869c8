"""``deepspeed.ops``: optimizers by DeepSpeed's names."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("adagrad", "adam", "lamb", "lion"), "ops")
