"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.utils import RepeatingLoader

__all__ = ["RepeatingLoader"]

__getattr__ = submodules(__name__, (), "runtime.dataloader")
