"""What the thread of a micro-batch takes over from the thread that calls ``accumulate``, and what cannot be taken over.

torch keeps much of its state per thread. A forward that ran in another thread without it would compute other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import (
    function_mode_at,
    in_functorch,
    len_dispatch_stack,
    len_function_stack,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)

_DEFAULT_DEVICE = "DeviceContext"
"""The class of the mode behind ``torch.set_default_device`` and ``with torch.device(...)``."""


class CallerState:
    """The state of the thread that makes it: gradient and inference mode, autocast, and the default device. The default
    dtype is the process's.

    Args:
        device_type: of the device that computes, of which autocast is taken over together with the CPU's.

    Raises:
        UnsupportedError: something is on that another thread cannot have; the message names it.
    """

    def __init__(self, device_type: str) -> None:
        modes = [type(function_mode_at(index)).__name__ for index in range(len_function_stack())]
        _refuse_untransferable(modes)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in dict.fromkeys(("cpu", device_type))
            if torch.is_autocast_enabled(kind)
        }
        self._device = torch.get_default_device() if modes else None

    @contextmanager
    def here(self) -> Iterator[None]:
        """The same state in this thread."""
        torch.get_num_threads()  # from here on OpenMP has the process's number in this thread, too
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            if self._device is not None:
                stack.enter_context(self._device)
            yield


def _refuse_untransferable(modes: list[str]) -> None:
    found = [mode for mode in modes if mode != _DEFAULT_DEVICE]
    if len_dispatch_stack():
        found.append("a TorchDispatchMode")
    if not saved_tensors_hooks_enabled():
        found.append("torch.autograd.graph.disable_saved_tensors_hooks")
    elif top_saved_tensors_hooks(True) is not None:
        found.append("torch.autograd.graph.saved_tensors_hooks")
    if in_functorch():
        found.append("a transform of torch.func")
    if found:
        raise UnsupportedError(
            f"accumulate inside {', '.join(found)}: the vertical order runs micro-batches in threads, which do not "
            'have it; enter it in the loss function, or say order="horizontal"'
        )
