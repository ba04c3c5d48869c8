"""``deepspeed.runtime.engine``."""

from __future__ import annotations

from deepoffload.deepspeed.engine import TrainingEngine as DeepSpeedEngine
from deepoffload.deepspeed.names import submodules

__all__ = ["DeepSpeedEngine"]

__getattr__ = submodules(__name__, (), "runtime.engine")
