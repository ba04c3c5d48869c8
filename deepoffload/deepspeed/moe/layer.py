"""``deepspeed.moe.layer``."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, (), "moe.layer")
