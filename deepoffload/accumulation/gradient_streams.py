"""Which streams of a device have made gradients that a call of ``accumulate`` keeps.

Autograd runs each node on the stream of its forward, and lets streams wait for each other where it adds up gradients
or hands them on (torch, "Stream semantics of backward passes"). Gradients that we take away and add up, or hand on
later, need the same from us. Where a program uses one stream, nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class GradientStreams:
    """Of one call. Nothing to do where the CPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._noted: dict[int, Any] = {}

    def note(self) -> None:
        """The current stream makes something that is kept."""
        if self._module is not None:
            stream = self._module.current_stream(self._device)
            self._noted[stream.stream_id] = stream

    def come_after(self, kept: Iterable[Tensor | None] = ()) -> None:
        """What the current stream does from now on, also with what is ``kept``, comes after what the others have been
        given to do."""
        if self._module is None:
            return
        current = self._module.current_stream(self._device)
        others = [stream for number, stream in self._noted.items() if number != current.stream_id]
        for stream in others:
            current.wait_stream(stream)
        if others:  # memory that is freed goes back to the stream that it was taken for
            for tensor in kept:
                if tensor is not None and tensor.device == self._device:
                    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                        part.record_stream(current)
