"""``deepspeed.runtime.zero.utils``."""

from __future__ import annotations

from deepoffload.deepspeed.zero import is_zero_param

__all__ = ["is_zero_param"]
