"""Which of the tensors that autograd saves leave, and how each comes back.

The hooks are the pair below ours for weights (``params.saved``): they get what is no weight where the program has
pushed none. An activation checkpoint, ``save_on_cpu`` and hooks of the program come first, then.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from deepoffload.activations.order_of_return import Call, Kept
from deepoffload.activations.store import ActivationStore
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.params.ports import PagerPort
from deepoffload.params.saved import SavedTensor, counter_of, maker_of, was_changed
from deepoffload.params.torch_private import in_backward, in_functorch, outside_user_modes

_INPUT_BYTES_MIN = PAGE_BYTES
"""Inputs of checkpointed blocks that are smaller stay: what describes them takes as much."""


class SavedActivation:
    """A saved tensor whose bytes are in the store. It notices edits in place, as torch does of what it keeps."""

    __slots__ = (
        "_store",
        "_kept",
        "_number",
        "_size",
        "_stride",
        "_offset",
        "_dtype",
        "_counter",
        "_version",
        "_maker",
    )

    def __init__(self, store: ActivationStore, kept: Kept, number: int, tensor: Tensor) -> None:
        self._store, self._kept, self._number = store, kept, number
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype
        self._counter = counter_of(tensor)
        self._version = tensor._version
        self._maker = maker_of(tensor)

    def restored(self) -> Tensor:
        """The tensor, in new memory.

        Raises:
            RuntimeError: torch's own message, when it was changed in place after it was saved.
            IoFailure: it could not be read. ClosedError: the engine is closed.
        """
        if self._counter._version != self._version:
            raise RuntimeError(was_changed(self._counter, self._size, self._version, self._maker))
        whole = self._store.bring(self._kept, self._number)
        with outside_user_modes():
            shown = torch.empty(0, dtype=self._dtype, device=whole.device)
            return shown.set_(whole.untyped_storage(), self._offset, self._size, self._stride)

    def __del__(self) -> None:
        self._store.drop(self._kept, self._number)


class ActivationHooks:
    """Args:
    above_bytes: other saved tensors leave, too, from this size of their storage on; None: inputs of checkpointed
        blocks alone.
    """

    def __init__(self, pager: PagerPort, store: ActivationStore, above_bytes: int | None) -> None:
        self._pager = pager
        self._storages = pager.storages
        self._device = pager.memory.device
        self._store = store
        self._above_bytes = above_bytes

    def pack(self, tensor: Tensor) -> SavedTensor | SavedActivation:
        if not self._leaves(tensor):
            return SavedTensor(tensor)
        with self._store.tiers.lock:  # Ctrl-C comes when it is let go: what has left has its owner by then
            kept, number = self._store.take(tensor, self._call())
            return SavedActivation(self._store, kept, number, tensor)

    def unpack(self, packed: Any) -> Tensor:
        return packed.checked() if type(packed) is SavedTensor else packed.restored()

    def _call(self) -> Call:
        opened = self._pager.hooks.opened()
        end = opened[0].frame_end if opened else None
        frame_end = None if end is None else end()
        return _no_call if frame_end is None else weakref.ref(frame_end)  # without the callback of the first one

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if in_backward() or in_functorch():
            return False  # it is used again at once; or it has no memory of its own
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False  # autograd keeps it in any case, for its gradient
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < _INPUT_BYTES_MIN or storage._cdata in self._storages:
            return False
        if self._above_bytes is not None and nbytes >= self._above_bytes:
            return True
        return _saved_by_checkpoint()


def _no_call() -> None:
    """What is saved outside of a call of the model."""


def _saved_by_checkpoint() -> bool:
    """Whether it is an activation checkpoint that saves: torch's code for both kinds calls what saves its arguments
    itself, or by ``Function.apply``. What runs inside of a checkpoint does not come here: without reentrant autograd
    its own hooks are above ours, and with it nothing is saved."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("deepoffload."):
        frame = frame.f_back
    for _ in range(2):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == checkpoint.__name__:
            return True
        frame = frame.f_back
    return False
