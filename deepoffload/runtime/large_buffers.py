"""Large buffers that are weights become frozen parameters, so that they are paged: quantised checkpoints have such."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from deepoffload.io.mapped_origin import MappedOrigins
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.runtime.backing import find_origin

LARGE_BYTES = 1 << 20
STORED_BYTES = PAGE_BYTES
"""The same of what lies in a checkpoint, such as the scales of packed weights: nothing is copied for it."""


def page_large_buffers(roots: Iterable[nn.Module], origins: MappedOrigins | None) -> None:
    """Register buffers of a checkpoint, and large integer ones, as parameters, under their names: a state dict has them
    as before. Those that are not saved with the model stay: the program may replace them at any time. So do large ones
    of other types that lie in no checkpoint: they may be what a model computes, such as a cache.

    Args:
        origins: knows what lies in a checkpoint; None where parameters take another type, which buffers may not.
    """
    made: dict[int, nn.Parameter] = {}
    for root in roots:
        for module in root.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is None or name in module._non_persistent_buffers_set or not _is_plain(buffer):
                    continue
                if _is_large_integer(buffer) or _is_stored(buffer, origins):
                    del module._buffers[name]
                    param = made.setdefault(id(buffer), nn.Parameter(buffer, requires_grad=False))
                    module.register_parameter(name, param)


def _is_plain(buffer: Tensor) -> bool:
    plain = type(buffer) is Tensor and not buffer.is_complex() and not buffer.is_quantized
    return plain and buffer.device.type == "cpu"


def _is_large_integer(buffer: Tensor) -> bool:
    return buffer.nbytes >= LARGE_BYTES and not buffer.is_floating_point()


def _is_stored(buffer: Tensor, origins: MappedOrigins | None) -> bool:
    return buffer.nbytes >= STORED_BYTES and find_origin(origins, buffer) is not None
