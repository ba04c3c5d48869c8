"""``deepspeed.runtime.utils``."""

from __future__ import annotations

from deepoffload.deepspeed import comm
from deepoffload.deepspeed.accelerator import get_accelerator
from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.utils.logging import logger

_GIB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what the device and the host have in use, on rank 0. Nothing without ``force``."""
    if not force or (comm.is_initialized() and comm.get_rank() != 0):
        return
    device = get_accelerator()
    used, peak = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    total, free = device.total_memory() / _GIB, device.available_memory() / _GIB
    logger.warning(
        "%s: %s has %.2f GiB in use, at most %.2f; %.2f GiB of %.2f are free",
        *(message, device.current_device_name(), used, peak, free, total),
    )


__getattr__ = submodules(__name__, (), "runtime.utils")
