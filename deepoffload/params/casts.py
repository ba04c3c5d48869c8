"""Autocast's casts of weights: known again when autograd saves them, and dropped before they are a second model.

[Note: casts under autocast] Under ``torch.autocast`` a linear layer computes with ``weight.to(torch.bfloat16)``. Two
parties keep that copy. Autograd saves it for backward, with the graph; and autocast keeps it in a cache until the
``with`` block ends, so that a weight which is used twice is cast once. Either of them would hold a 16-bit copy of the
whole model in memory that no budget counts.

Autograd is answered by our saved-tensor hooks: a cast of a weight is saved as (weight, type, view), and made again for
backward, with the same bits. A cast of a weight that is trained has a graph, ``ToCopyBackward0`` of the weight's
``AccumulateGrad``, by which it is known. A cast of a frozen weight has none. It is known by its values, among the
weights of its shape in the windows that are open.

Autocast is answered by emptying its cache when the next window is entered. One rule limits this. Where a weight is used
twice in one forward, torch adds the gradients of one shared cast in 16 bits, and those of two casts in 32 bits: to
drop the cast in between would change the numbers. So from the first time on that a weight is seen to be used twice, the
cache is left alone (``shared``). For example, a tied embedding is in two windows, which is known when these are made. A
layer that is called twice shows it by its second call before a backward.

Autocast keeps casts of other leaves, too. In the second run of a reentrant checkpoint the argument of a layer is one,
and the gradients that the layer's parts send back to it are added in 16 bits where they share the cast. So the cache is
left alone from where a window gets such an argument to the end of that run: it holds the casts of one checkpoint's
weights. In a forward nothing comes before a leaf, so its casts are dropped: only its own gradient is then added in 32
bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from deepoffload.memory.lock import SHIELD
from deepoffload.params.ports import PagerPort
from deepoffload.params.torch_private import current_node, get_data, in_functorch, outside_user_modes, tree_leaves
from deepoffload.params.unit import ParamHandle

NARROW = (torch.bfloat16, torch.float16)
"""What autocast casts weights to."""

_WIDE = (torch.float32, torch.float64)


class CastCache:
    """What autocast's cache may hold of the models' weights. Windows are known by their ids.

    Attributes:
        shared: weights are used more than once in a forward, so the cache is left alone.
        held_by: the window whose casts are in the cache and leave it when another one is entered.
        leaves: arguments whose casts are in the cache for the windows that come. run: in the run of which node.
    """

    def __init__(self) -> None:
        self.shared = False
        self.held_by: int | None = None
        self.left: set[tuple[int, int | None]] = set()
        self.leaves: list[weakref.ref[Tensor]] = []
        self.run: int | None = None

    def share(self) -> None:
        """Weights are used more than once in a forward: the cache is left alone from now on."""
        self.shared = True

    def enter(self, window: int, args: Any, kwargs: Any, device: str) -> None:
        """A window is entered, with these arguments."""
        node = current_node()
        run = None if node is None else node._sequence_nr()
        if run != self.run or not any(leaf() is not None for leaf in self.leaves):
            self.leaves, self.run = [], run
        if self.held_by is not None and self.held_by != window and not self.leaves:
            self.drop()
        if run is not None and torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
            self.leaves += [weakref.ref(value) for value in tree_leaves((args, kwargs)) if _is_kept(value)]

    def drop(self) -> None:
        """Empty autocast's cache."""
        self.held_by = None
        torch.clear_autocast_cache()

    def leave(self, window: int, forward: int | None) -> None:
        """A window ends that ran under autocast and its cache. ``forward``: of which of several forwards that run side
        by side; None where one runs."""
        if torch.is_grad_enabled():
            self.shared |= (window, forward) in self.left
            self.left.add((window, forward))
        self.held_by = None if self.shared else window

    def forget(self) -> None:
        """A backward is running: what casts weights from now on is another forward."""
        if self.left:
            self.left.clear()


def _is_kept(value: Any) -> bool:
    """Whether autocast keeps casts of an argument: those of weights are known otherwise."""
    return type(value) is Tensor and value.dtype is torch.float32 and value.requires_grad and value.is_leaf


FoundCast = tuple[ParamHandle, Tensor, Tensor]
"""A weight's handle and tensor, and the whole cast that a tensor is, or is a view of."""


def cast_of_weight(tensor: Tensor, pager: PagerPort) -> FoundCast | None:
    """Of which weight ``tensor``, which has a graph, is a cast or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or tensor.is_conj() or tensor.is_neg():
        return None
    weight: Any = getattr(node.next_functions[0][0], "variable", None)  # of an AccumulateGrad node
    handle = None if weight is None else weight.__dict__.get("_slot")
    if not isinstance(handle, ParamHandle) or handle.pager is not pager or base.shape != handle.shape:
        return None
    if base._version or not (_only_autocast_has_it(pager) or _is_cast_of(handle, base, pager)):
        return None
    return handle, weight, base


def _only_autocast_has_it(pager: PagerPort) -> bool:
    """Whether a cast that is saved now is surely autocast's own, which no code of the program has seen: the running
    module's code has no name by which it could edit one without a trace."""
    opened = pager.hooks.opened()
    return bool(opened) and opened[-1].plain and torch.is_autocast_enabled(pager.memory.device.type)


def _is_cast_of(handle: ParamHandle, base: Tensor, pager: PagerPort) -> bool:
    """Whether the program has left the values of a cast as they were."""
    with SHIELD:
        pager.pin(handle)
        try:
            weight = handle.tensor
            return weight is not None and _is_cast(base, weight)
        finally:
            pager.unpin(handle)


def cast_of_frozen(tensor: Tensor, pager: PagerPort) -> FoundCast | None:
    """The same of a frozen weight, whose cast has no graph: it is known by its values, among those of the modules that
    are running."""
    if in_functorch() or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    base = tensor if tensor._base is None else tensor._base
    for entry in reversed(pager.hooks.opened()):
        for handle in entry.window.of_shape(base.shape):
            weight = handle.tensor
            if weight is not None and not weight.requires_grad and _is_cast(base, weight):
                return handle, weight, base
    return None


def _is_cast(tensor: Tensor, weight: Tensor) -> bool:
    """Whether ``tensor`` is ``weight`` in a narrower type, bit for bit."""
    with outside_user_modes():
        shown = get_data(weight)
        if shown.dtype not in _WIDE or shown.device != tensor.device:
            return False
        cast = cast_again(shown, tensor.stride(), tensor.dtype)
        return torch.equal(cast.view(torch.int16), get_data(tensor).view(torch.int16))


def cast_again(shown: Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The cast that autocast makes of the bytes that a weight shows. Call it outside of the program's modes."""
    return torch.empty_strided(shown.size(), stride, dtype=dtype, device=shown.device).copy_(shown)
