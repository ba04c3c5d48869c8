"""``deepspeed.ops.adam.fused_adam``."""

from __future__ import annotations

from deepoffload.deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
