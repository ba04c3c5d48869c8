"""``deepspeed.utils.init_on_device``."""

from __future__ import annotations

from deepoffload.deepspeed.utils import OnDevice

__all__ = ["OnDevice"]
