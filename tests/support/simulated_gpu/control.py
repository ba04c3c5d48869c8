"""Installing the simulated GPU, and its settings."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from types import ModuleType

import torch

from tests.support.simulated_gpu.build import MODULE, build
from tests.support.simulated_gpu.device_module import NAME, make

MODES = ("late", "random", "eager")


@functools.cache
def native() -> ModuleType:
    """The compiled simulator, with no devices yet."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(build()))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install(devices: int = 2, memory_bytes: int = 256 << 20) -> None:
    """Make the device ``simgpu`` known to torch, for the rest of the process. Later calls change nothing.

    Args:
        devices: how many there are.
        memory_bytes: what each has. An engine takes most of it, and each byte is written when it is taken, and when it
            is given back.

    Raises:
        RuntimeError: it does not compile.
    """
    if native().device_count() == 0:
        native().open(devices, memory_bytes)
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, make(native()))


def settings(
    mode: str = "late",
    seed: int = 0,
    check: bool = True,
    delay_max_s: float = 0.002,
    pinned_max_bytes: int | None = None,
) -> None:
    """Choose the schedule. What is queued is done first.

    Args:
        mode: ``late``: a queued copy is done when something waits for it; ``random``: a thread does one after the
            other, each after a delay; ``eager``: at once.
        seed: of the delays and of the order between streams.
        check: report accesses that no wait puts in order.
        delay_max_s: the longest delay.
        pinned_max_bytes: host memory that may be page-locked; more is refused.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    native().set(mode, seed, delay_max_s, check)
    native().limit_pinned((1 << 64) - 1 if pinned_max_bytes is None else pinned_max_bytes)


def pending() -> list[tuple[int, str]]:
    """What is queued, as (number of the stream, name of the operation)."""
    return native().pending()


def reset() -> None:
    """Drop what is queued, forget who touched what, and settings as they were."""
    native().reset()
    settings()
