"""Large integer buffers become frozen parameters, so that they are paged: quantised checkpoints keep weights there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

LARGE_BYTES = 1 << 20


def page_large_buffers(roots: Iterable[nn.Module]) -> None:
    """Register large integer buffers as parameters, under their names: a state dict has them as before. Those that are
    not saved with the model stay: the program may replace them at any time."""
    made: dict[int, nn.Parameter] = {}
    for root in roots:
        for module in root.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and name not in module._non_persistent_buffers_set and _is_large(buffer):
                    del module._buffers[name]
                    param = made.setdefault(id(buffer), nn.Parameter(buffer, requires_grad=False))
                    module.register_parameter(name, param)


def _is_large(buffer: Tensor) -> bool:
    is_integer = not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype.itemsize == 0)
    return type(buffer) is Tensor and buffer.device.type == "cpu" and is_integer and buffer.nbytes >= LARGE_BYTES
