"""What must not be on around a call of ``accumulate`` in vertical order."""

from __future__ import annotations

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


def refuse_modes_of_caller() -> None:
    """Modes and hooks around the call would see the operations of all micro-batches mixed.

    Raises:
        UnsupportedError: one is on; the message names it.
    """
    modes = [type(function_mode_at(index)).__name__ for index in range(len_function_stack())]
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
            f"accumulate inside {', '.join(found)}: in vertical order it would see the operations of all micro-batches "
            'mixed; enter it in the loss function, or say order="horizontal"'
        )
