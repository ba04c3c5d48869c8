"""``deepspeed.moe``: nothing of it is here; scripts import its names and use them in one of their modes."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("experts", "layer", "sharded_moe", "utils"), "moe")
