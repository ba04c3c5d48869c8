"""The way of a rank's gradients from a device into its contributions.

Each goes to its place at once, on the stream of copies, while backward launches on. A contribution is announced when
all of it has come: then other ranks may read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.host_link import HostLink
from deepoffload.optim.contribution_layout import Stretch
from deepoffload.params.torch_private import outside_user_modes


class GradientsOut:
    """Copies gradients out of a device. Guarded by the tier manager's lock."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    def put(self, offset: int, stretches: Sequence[Stretch], grad: Tensor) -> Tensor:
        """Start copying a gradient into the contribution at ``offset`` in the arena.

        Args:
            stretches: where its elements go.
            grad: complete on the current stream; its elements lie in memory as those of its parameter.

        Returns:
            What has to live until the event of :meth:`mark` has happened.
        """
        accelerator, itemsize = self._link.accelerator, grad.element_size()
        stream = accelerator.copy_out
        stream.wait_event(accelerator.event(accelerator.current()))
        with outside_user_modes():
            source = grad.as_strided((grad.numel(),), (1,)).view(torch.uint8)
            with accelerator.on(stream):
                for start, numel, place in stretches:
                    part = source[start * itemsize : (start + numel) * itemsize]
                    self._link.take(part, offset + place)
        self._link.transfers.out_bytes += source.numel()
        return source

    def mark(self) -> Any:
        """An event that has happened when all has come that was put until now."""
        return self._link.accelerator.event(self._link.accelerator.copy_out)
