"""``deepspeed.runtime.bf16_optimizer``: nothing of it is here."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, (), "runtime.bf16_optimizer")
