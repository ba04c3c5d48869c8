"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from deepoffload.deepspeed.utils import RepeatingLoader

__all__ = ["RepeatingLoader"]
