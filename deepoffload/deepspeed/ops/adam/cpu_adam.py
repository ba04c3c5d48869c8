"""``deepspeed.ops.adam.cpu_adam``."""

from __future__ import annotations

from deepoffload.deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
