"""``deepspeed.runtime.zero.tiling``."""

from __future__ import annotations

from deepoffload.deepspeed.tiling import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
