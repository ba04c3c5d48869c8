"""The backward door: what autograd saves of a weight is a description, and the weight is fetched again when it is
needed.

torch calls only the top pair of saved-tensor hooks, so ours hands everything that is not a weight to the pair that
was on top before it (activation checkpointing, ``save_on_cpu``, the user's own), and unpacks through that pair again.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from deepoffload.errors import ClosedError
from deepoffload.params.casts import NARROW, cast_again, cast_of_frozen, cast_of_weight
from deepoffload.params.ports import PagerPort
from deepoffload.params.torch_compiler import NOT_CAPTURED, leave_to_python
from deepoffload.params.torch_private import (
    get_data,
    in_backward,
    in_functorch,
    modes_active,
    outside_user_modes,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    set_data,
    set_versions,
    top_saved_tensors_hooks,
    version_of,
)
from deepoffload.params.unit import ParamHandle

_PACKAGE = __name__.split(".")[0]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_NAMED_TYPES = (
    *(torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Those that torch's errors call by their old class names."""

_CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_WITHHELD = (
    ". saved_tensors_hooks, save_on_cpu among them, are given no paged weight, so they have no copy of the old values: "
    "call backward before the change"
)
_HINT = (
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True, check_nan=False)."
)
_HINT_IN_ANOMALY = (
    "Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable in "
    "question was changed in there or anywhere later. Good luck!"
)
"""torch's words, so that what looks for them finds them."""


class SavedWeight:
    """A weight, or a view of one, saved for backward.

    Attributes:
        version: the version that it must still have; None behind a checkpoint, which runs the forward again with the
            values that the weight has then.
        withheld: whether hooks of the program did not get it.
    """

    __slots__ = ("handle", "size", "stride", "offset", "version", "withheld")

    def __init__(self, handle: ParamHandle, tensor: Tensor, version: int | None, *, withheld: bool = False) -> None:
        self.handle = handle
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = version
        self.withheld = withheld


class SavedCast(SavedWeight):
    """A copy of a weight in a narrower type, as autocast makes it, or a view of one: it is made again for backward,
    unless the program still has it. See [Note: casts under autocast] in ``params.casts``."""

    __slots__ = ("dtype", "base_stride", "base", "counter", "base_version", "made_by")

    def __init__(self, handle: ParamHandle, tensor: Tensor, base: Tensor, version: int | None) -> None:
        super().__init__(handle, tensor, version)
        self.dtype = tensor.dtype
        self.base_stride = base.stride()
        self.base = weakref.ref(base)
        self.counter = counter_of(base)
        self.base_version = base._version
        self.made_by = maker_of(tensor)

    def kept(self) -> Tensor | None:
        """The cast itself while somebody has it, who may have edited it; None else, and behind a checkpoint.

        Raises:
            RuntimeError: torch's own message, when it was changed in place after it was saved.
        """
        if self.version is None:
            return None
        if self.counter._version != self.base_version:
            raise RuntimeError(was_changed(self.counter, self.size, self.base_version, self.made_by))
        base = self.base()
        if base is None:
            return None
        with outside_user_modes():
            return torch.as_strided(base.detach(), self.size, self.stride, self.offset)


class SavedTensor:
    """Any other tensor, without its graph, and the version that it had. torch compares versions only of what it keeps
    without hooks, so ours compares them in its place.

    Attributes:
        made_by: the name of the node that made it and which of its outputs it is; None for a leaf.
    """

    __slots__ = ("tensor", "version", "made_by")

    def __init__(self, tensor: Tensor) -> None:
        self.made_by: tuple[str, int] | None = None
        if tensor.requires_grad:
            self.made_by = maker_of(tensor)
            tensor = _without_graph(tensor)
        self.tensor = tensor
        self.version = _version_of_any(tensor)

    def checked(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: torch's own message, when it was changed in place after it was saved.
        """
        tensor = self.tensor
        version = _version_of_any(tensor)
        if version != self.version:
            raise RuntimeError(was_changed(tensor, tensor.shape, self.version, self.made_by))
        return tensor


class SavedBelow:
    """What the pair of hooks below ours made of a tensor, and how to get it back."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedTensorHooks:
    """One pair of hooks: packs the weights of ``pager``, gives all else to the pair ``below`` (or keeps it as it is).

    A pair of the program's is not given weights: what it keeps of them would be a second model in memory. So a weight
    that was changed before backward is refused there, too, where a pair that copies would have had the old values.

    Args:
        again: set while a double backward records. Tensors from :func:`restore` have fresh version counters, so compare
            with the parameter's version.

    Attributes:
        withheld: whether ``below`` is a pair of the program's, which the error then mentions.
    """

    __slots__ = ("pager", "below", "again", "run_again", "withheld")

    def __init__(self, pager: PagerPort, below: Hooks | None, *, again: bool = False) -> None:
        self.pager = pager
        self.below = below
        self.again = again
        self.withheld = below is not None and not _hook_module(below).startswith(f"{_PACKAGE}.")
        self.run_again = of_checkpoint(below)

    def pack(self, tensor: Tensor) -> Any:
        try:
            slot = self.pager.storages.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse, or wrapped by functorch: never one of ours
            slot = None
        if isinstance(slot, ParamHandle) and tensor.dtype is slot.dtype and not (tensor.is_conj() or tensor.is_neg()):
            if self.run_again:
                return SavedWeight(slot, tensor, None)
            weight = slot.tensor if self.again else None
            version = tensor._version if weight is None else version_of(weight)
            return SavedWeight(slot, tensor, version, withheld=self.withheld)
        if slot is None and tensor.dtype in NARROW:
            found = (cast_of_weight if tensor.requires_grad else cast_of_frozen)(tensor, self.pager)
            if found is not None:
                handle, weight, base = found
                return SavedCast(handle, tensor, base, None if self.run_again else version_of(weight))
        if slot is not None or getattr(tensor, "_slot", None) is not None:
            tensor = _alias(tensor)  # a gradient, or another engine's: the object would lose its bytes, an alias not
        if self.below is None:
            return SavedTensor(tensor)
        return SavedBelow(self.below[0](tensor), self.below[1])

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is SavedTensor:
            return packed.checked()
        if type(packed) is SavedBelow:
            return packed.unpack(packed.packed)
        return restore(packed)


leave_to_python(SavedTensorHooks.pack, NOT_CAPTURED)
leave_to_python(SavedTensorHooks.unpack, NOT_CAPTURED)


def of_checkpoint(hooks: Hooks | None) -> bool:
    """Whether a pair of hooks is that of a non-reentrant activation checkpoint."""
    return hooks is not None and _hook_module(hooks) == checkpoint.__name__


def _hook_module(hooks: Hooks) -> str:
    return getattr(hooks[0], "__module__", None) or ""


def saved_for_checkpoint() -> bool:
    """Whether what autograd saves in this thread now goes to an activation checkpoint: it is dropped, and made again in
    backward; or this is where it is made again."""
    top = top_saved_tensors_hooks(True) if saved_tensors_hooks_enabled() else None
    mine = None if top is None else getattr(top[0], "__self__", None)
    return mine.run_again if type(mine) is SavedTensorHooks else of_checkpoint(top)


def _version_of_any(tensor: Tensor) -> int:
    return tensor._version if type(tensor) is Tensor else version_of(tensor)


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor without elements that has the version counter of another one, and not its memory."""
    with outside_user_modes():
        counter = tensor.detach()
        set_data(counter, counter.new_empty(0))
        return counter


def share_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one in-place counter, not two that stand equally high. Neither may be a weight."""
    version = one._version
    set_versions((one,), (version + 1,))
    try:
        return version == other._version - 1
    finally:
        set_versions((one,), (version,))


def maker_of(tensor: Tensor) -> tuple[str, int] | None:
    """The name of the node that made a tensor and which of its outputs it is; None for a leaf."""
    node = tensor.grad_fn
    return None if node is None else (node.name(), tensor.output_nr)


def was_changed(tensor: Tensor, shape: torch.Size, expected: int, made_by: tuple[str, int] | None) -> str:
    """torch's message about a tensor that was changed in place after it was saved. ``shape``: of what was saved, which
    may be a view of ``tensor``."""
    origin = ""
    if made_by is not None:
        name, output = made_by
        origin = f", which is output {output} of {re.sub('Backward[0-9]*$', '', name)},"
    return (
        f"{_CHANGED}: [{_type_name(tensor)} {list(shape)}]{origin} is at version {_version_of_any(tensor)}; "
        f"expected version {expected} instead. {_HINT_IN_ANOMALY if torch.is_anomaly_enabled() else _HINT}"
    )


def _type_name(tensor: Tensor) -> str:
    """The name of a tensor's type as torch's errors have it."""
    name = tensor.type()
    if tensor.dtype in _NAMED_TYPES:
        return name
    return f"{tensor.device.type.upper()}{name.rsplit('.', 1)[1].removesuffix('Tensor')}Type"


def _alias(tensor: Tensor) -> Tensor:
    """Another object over the memory that a paged tensor shows, with the same version counter."""
    with outside_user_modes():
        return tensor.detach()


def _without_graph(tensor: Tensor) -> Tensor:
    """The same memory and version counter without its graph. A node that held its own output would hold itself: the
    graph of a loss that is never used for backward would never end (``torch.autograd.graph.saved_tensors_hooks``
    warns of it)."""
    if not modes_active():
        return tensor.detach()
    if in_functorch():
        return tensor
    if type(tensor) is Tensor:
        with outside_user_modes():
            return tensor.detach()
    return tensor.detach()


def _describe_again(pager: PagerPort) -> None:
    """A backward that records a graph (``create_graph=True``) saves what it computes with: have it save descriptions of
    weights, too. Autograd sets back the stack of hooks after each node, so nobody has to pop these."""
    if saved_tensors_hooks_enabled():
        top = top_saved_tensors_hooks(True)
        mine = None if top is None else getattr(top[0], "__self__", None)
        if type(mine) is not SavedTensorHooks or mine.pager is not pager or not mine.again:
            hooks = SavedTensorHooks(pager, top, again=True)
            push_saved_tensors_hooks(hooks.pack, hooks.unpack)


def restore(saved: SavedWeight) -> Tensor:
    """The weight that was saved, fetched if need be.

    Raises:
        RuntimeError: torch's own message, when the weight was changed between forward and backward.
        ClosedError: the engine or the parameter is gone.
    """
    handle = saved.handle
    pager = handle.pager
    if torch.is_grad_enabled() and in_backward():
        _describe_again(pager)
    kept = saved.kept() if type(saved) is SavedCast else None
    if kept is not None:
        return kept
    with pager.lock:
        if handle.tensor is None:
            raise ClosedError(f"{handle.name} was deleted between forward and backward")
        pager.pin_for_backward(handle)
        try:
            param = handle.tensor
            if param is None:
                raise ClosedError(f"{handle.name} was deleted between forward and backward")
            if saved.version is not None and not pager.graphs.is_version(handle, saved.version, version_of(param)):
                raise RuntimeError(
                    f"{_CHANGED}: parameter {handle.name} {list(saved.size)} was changed (an optimizer step counts) "
                    f"after the forward pass that saved it{_WITHHELD if saved.withheld else ''}"
                )
            shown = get_data(param)
            if type(saved) is SavedCast:
                with outside_user_modes():
                    shown = cast_again(shown, saved.base_stride, saved.dtype)
            if saved.offset == 0 and saved.size == shown.size() and saved.stride == shown.stride():
                return shown
            if not modes_active():
                return shown.as_strided(saved.size, saved.stride, saved.offset)
            with outside_user_modes():
                return torch.as_strided(shown, saved.size, saved.stride, saved.offset)
        finally:
            pager.unpin(handle)
