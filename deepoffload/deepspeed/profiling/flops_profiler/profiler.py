"""``deepspeed.profiling.flops_profiler.profiler``: nothing of it is here."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules

__getattr__ = submodules(__name__, (), "profiling.flops_profiler")
