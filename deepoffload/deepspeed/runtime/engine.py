"""``deepspeed.runtime.engine``."""

from __future__ import annotations

from deepoffload.deepspeed.engine import TrainingEngine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
