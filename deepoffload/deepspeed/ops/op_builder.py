"""``deepspeed.ops.op_builder``: nothing is built while a program runs, but scripts ask for operators this way."""

from __future__ import annotations

from types import ModuleType

from deepoffload.deepspeed.names import submodules


class AsyncIOBuilder:
    """Gives :mod:`deepoffload.deepspeed.ops.aio_handle`, with DeepSpeed's ``aio_handle`` over our own I/O engine."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here: it does, because one of the engine's backends always can be started."""
        return True

    def load(self, verbose: bool = True) -> ModuleType:
        """The module with ``aio_handle``, ``aio_read`` and ``aio_write``."""
        from deepoffload.deepspeed.ops import aio_handle

        return aio_handle

    def builder(self) -> AsyncIOBuilder:
        return self


__getattr__ = submodules(__name__, (), "ops.op_builder")
