"""``deepspeed.ops.aio``."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.ops.op_builder import AsyncIOBuilder as AsyncIOBuilder

__getattr__ = submodules(__name__, (), "ops.aio")
