"""Graphs that autograd keeps of weights, as far as an update, an eviction or the end makes them wrong.

A graph that was made under our saved-tensor hooks describes its weights (see ``params.saved``) and fetches them again.
Where nothing ever moves no hooks are pushed, and autograd keeps the weights themselves. Both compare the weight's
version with the one that was saved, so moving the version is how a graph is told that it must not be used any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from deepoffload.memory.block import Block
from deepoffload.params.torch_private import version_of
from deepoffload.params.unit import BlockView, ParamHandle, Unit


class OpenGraphs:
    """Attributes:
    forwards: how often autograd may have begun to keep weights without our hooks, because nothing was to move.
    forwards_stepped: so many of them were before the last optimizer step.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.forwards_stepped = 0
        self._recounted: weakref.WeakKeyDictionary[ParamHandle, tuple[int, int]] = weakref.WeakKeyDictionary()

    def note_unhooked(self) -> None:
        """A window begins without our hooks."""
        if torch.is_grad_enabled():
            self.forwards += 1

    def end_of_step(self) -> None:
        self.forwards_stepped = self.forwards

    def refuse_all(self, units: Iterable[Unit]) -> None:
        """From now on backward through what autograd has kept of the weights is an error: their bytes go."""
        for unit in units:
            for handle in unit.handles:
                handle.count_update()

    def refuse_unhooked(self, block: Block) -> None:
        """A block that was to stay leaves: graphs that autograd made without us, while everything stayed, would go
        backward with what the tensor shows then. By another version they see that they must not."""
        if not self.forwards or not isinstance(block.owner, BlockView) or not block.owner.on_host:
            return
        for slot in block.owner.slots:
            tensor = slot.tensor
            if isinstance(slot, ParamHandle) and tensor is not None and version_of(tensor) == slot.version:
                slot.count_update()
                self._recounted[slot] = slot.version - 1, slot.version

    def is_version(self, handle: ParamHandle, saved: int, now: int) -> bool:
        """Whether a weight has been the same since its version was ``saved``. A graph under our hooks fetches the
        weight, so a version that only :meth:`refuse_unhooked` moved is the same to it."""
        return saved == now or self._recounted.get(handle) == (saved, now)
