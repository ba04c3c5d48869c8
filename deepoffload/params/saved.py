"""The backward door: what autograd saves of a weight is a description, and the weight is fetched again when it is
needed.

torch calls only the top pair of saved-tensor hooks, so ours hands everything that is not a weight to the pair that
was on top before it (activation checkpointing, ``save_on_cpu``, the user's own), and unpacks through that pair again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import ClosedError
from deepoffload.params.ports import PagerPort
from deepoffload.params.torch_private import bare, get_data, in_functorch, modes_active, version_of
from deepoffload.params.unit import ParamHandle

_NARROW = (torch.bfloat16, torch.float16)
"""What autocast casts weights to."""


class SavedWeight:
    """A weight, or a view of one, saved for backward."""

    __slots__ = ("handle", "size", "stride", "offset", "version")

    def __init__(self, handle: ParamHandle, tensor: Tensor) -> None:
        self.handle = handle
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version


class SavedCast(SavedWeight):
    """A copy of a weight in a narrower type, as autocast makes it, or a view of one: it is made again for backward.

    Otherwise a forward under autocast would keep a second copy of the model in memory, in 16 bits per weight.
    """

    __slots__ = ("dtype", "base_stride")

    def __init__(self, handle: ParamHandle, weight: Tensor, tensor: Tensor, base: Tensor) -> None:
        super().__init__(handle, tensor)
        self.version = version_of(weight)
        self.dtype = tensor.dtype
        self.base_stride = base.stride()


class SavedBelow:
    """What the pair of hooks below ours made of a tensor, and how to get it back."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedTensorHooks:
    """One pair of hooks: packs the weights of ``pager``, gives all else to the pair ``below`` (or keeps it as it
    is)."""

    __slots__ = ("pager", "below")

    def __init__(self, pager: PagerPort, below: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None) -> None:
        self.pager = pager
        self.below = below

    def pack(self, tensor: Tensor) -> Any:
        try:
            slot = self.pager.storages.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse, or wrapped by functorch: never one of ours
            slot = None
        if isinstance(slot, ParamHandle) and tensor.dtype is slot.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return SavedWeight(slot, tensor)
        if slot is None and tensor.dtype in _NARROW and tensor.requires_grad:
            cast = self._cast_of_weight(tensor)
            if cast is not None:
                return cast
        if slot is not None or getattr(tensor, "_slot", None) is not None:
            tensor = get_data(tensor)  # a gradient, or another engine's: the object would lose its bytes, an alias not
        if self.below is None:
            return _without_graph(tensor)
        return SavedBelow(self.below[0](tensor), self.below[1])

    def _cast_of_weight(self, tensor: Tensor) -> SavedCast | None:
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or tensor.is_conj() or tensor.is_neg():
            return None
        weight: Any = getattr(node.next_functions[0][0], "variable", None)  # of an AccumulateGrad node
        handle = None if weight is None else weight.__dict__.get("_slot")
        if not isinstance(handle, ParamHandle) or handle.pager is not self.pager or base.shape != handle.shape:
            return None
        return SavedCast(handle, weight, tensor, base)

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is SavedWeight or type(packed) is SavedCast:
            return restore(packed)
        if type(packed) is SavedBelow:
            return packed.unpack(packed.packed)
        return packed


def _without_graph(tensor: Tensor) -> Tensor:
    """The same memory without its graph. A node that held its own output would hold itself: the graph of a loss that is
    never used for backward would stay for ever (``torch.autograd.graph.saved_tensors_hooks`` warns of it)."""
    if not tensor.requires_grad or in_functorch():
        return tensor
    if type(tensor) is Tensor and modes_active():
        with bare():
            return tensor.detach()
    return tensor.detach()


def restore(saved: SavedWeight) -> Tensor:
    """The weight that was saved, fetched if need be.

    Raises:
        RuntimeError: torch's own message, when the weight was changed between forward and backward.
        ClosedError: the engine or the parameter is gone.
    """
    handle = saved.handle
    pager = handle.pager
    with pager.lock:
        if handle.tensor is None:
            raise ClosedError(f"{handle.name} was deleted between forward and backward")
        pager.pin_for_backward(handle)
        try:
            param = handle.tensor
            if param is None:
                raise ClosedError(f"{handle.name} was deleted between forward and backward")
            if version_of(param) != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"parameter {handle.name} {list(saved.size)} was changed (an optimizer step counts) after the "
                    "forward pass that saved it"
                )
            shown = get_data(param)
            if type(saved) is SavedCast:
                with bare():
                    shown = torch.empty_strided(
                        shown.size(), saved.base_stride, dtype=saved.dtype, device=shown.device
                    ).copy_(shown)
            if saved.offset == 0 and saved.size == shown.size() and saved.stride == shown.stride():
                return shown
            if not modes_active():
                return shown.as_strided(saved.size, saved.stride, saved.offset)
            with bare():
                return torch.as_strided(shown, saved.size, saved.stride, saved.offset)
        finally:
            pager.unpin(handle)
