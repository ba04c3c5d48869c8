"""``deepspeed.checkpoint``: one function of it; ``engine.save_checkpoint`` writes what there is to write."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, ("utils",), "checkpoint")
