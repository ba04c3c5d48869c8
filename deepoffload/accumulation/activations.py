"""What the forwards of one call of ``accumulate`` keep for their backwards: all activations, or the tensors between
units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload import machine
from deepoffload.accumulation.asked import choose
from deepoffload.accumulation.recomputed import Caches, Recomputed
from deepoffload.config import ActivationMode
from deepoffload.config.units import format_bytes
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.params.kept_attributes import KeptAttributes
from deepoffload.params.ports import ActivationRegion, PagerPort
from deepoffload.params.saved import SavedTensor, SavedTensorHooks, saved_for_checkpoint
from deepoffload.params.torch_private import (
    in_functorch,
    past_doors,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    requires_grad_of,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_leaves,
)
from deepoffload.params.torch_thread import in_cached_blocks
from deepoffload.params.window import Window
from deepoffload.runtime.announce import announce
from deepoffload.runtime.engine import Engine


def activation_mode(engine: Engine | None, asked: str | None) -> ActivationMode:
    """What a call asks for, or else the configuration.

    Raises:
        UsageError: there is no such mode.
    """
    configured = ActivationMode.AUTO if engine is None else engine.config.activations
    return choose(ActivationMode, "activations", asked, configured)


def _fits(pager: PagerPort, count: int) -> bool | None:
    """Whether memory has room for the activations of ``count`` micro-batches. Says it when that is found out; None
    where none has been measured. A unit that leaves an attribute another one is not run twice: they have to fit."""
    if pager.order.attributes is not None and pager.order.attributes.first:
        return True
    room = pager.order.activations
    first = room.allowed_bytes is None
    fits = room.holds(count, partial(_free_bytes, pager))
    if first and room.micro_batch_bytes is not None and room.allowed_bytes is not None:
        needed, allowed = format_bytes(count * room.micro_batch_bytes), format_bytes(room.allowed_bytes)
        done = "they are kept" if fits else "units run again in backward"
        announce(f"activations of {count} micro-batches take {needed}, and {allowed} may be used: {done}")
    return fits


def _free_bytes(pager: PagerPort) -> int:
    """Of the memory that activations take."""
    memory = pager.memory
    if isinstance(memory, CopyMemory) and memory.device.type != "cpu":
        return memory.accelerator.free_bytes()
    # holes of the arena may be memory that nobody has touched yet
    return machine.measure().memory_available_bytes - pager.tiers.arena.free_bytes


def _limits_rows(module: nn.Module) -> bool:
    """Whether a call writes to the weight of an embedding (``max_norm``)."""
    tables = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return any(table.max_norm is not None for table in tables)


class Activations:
    """Of one call. Windows ask it when they open in a forward with gradients.

    With ``AUTO`` the first micro-batch of the first call keeps its activations, and they are counted. Then it is known
    whether memory has room for those of all.

    Args:
        count: of the micro-batches whose activations would be kept at the same time.
        attributes: that the model's forwards change. Where no forward has shown them yet, the first micro-batch does.
    """

    def __init__(self, mode: ActivationMode, count: int, pager: PagerPort, attributes: KeptAttributes) -> None:
        self._attributes = attributes
        self._room = pager.order.activations
        self._fits = partial(_fits, pager, count)
        fits = self._fits() if mode is ActivationMode.AUTO else mode is ActivationMode.KEEP
        self._recompute = not fits
        self._device = pager.memory.device
        self._counted = Counted(pager) if mode is ActivationMode.AUTO and fits is not False else None
        if self._counted is not None:
            self._room.begin_call()
        self._caches: defaultdict[int, Caches] = defaultdict(Caches)
        self._inputs: dict[Window, list[tuple[Tensor, int]]] = {}

    @property
    def are_kept(self) -> bool:
        """Whether units keep their activations until backward."""
        return not self._recompute

    def region(self, number: int, window: Window, module: nn.Module, args: Any, kwargs: Any) -> ActivationRegion | None:
        """What is done with the activations of a call by micro-batch ``number``; None: autograd keeps them as ever."""
        if number == 0:
            self._attributes.look(module)
        counted = self._counted if number == 0 else None
        if not (counted or self._recompute) or in_functorch() or not saved_tensors_hooks_enabled():
            return None
        if self._attributes.weight or self._attributes.edited or in_cached_blocks():
            return None  # a second run would compute with other weights, write to them, or compute them again
        if saved_for_checkpoint():
            return None  # the program's own, around this module or one that encloses it
        if counted is not None:
            given = tree_leaves((args, kwargs))
            call = counted.call(window, _kind_of_call(window, module, given))
            if call is None or call.hooked:
                self._inputs[window] = [
                    (leaf, leaf._version) for leaf in given if isinstance(leaf, Tensor) and not leaf.is_inference()
                ]
            return call
        leaves, structure = tree_flatten((args, kwargs))
        self._look_for_edits(window)
        if window in self._room.edited:
            return None
        kept = self._caches[number].emptied(leaves)
        if kept is None or _limits_rows(module):
            return None
        return Recomputed(module, kept, structure, self._attributes, self._device)

    def call_ended(self, number: int, window: Window) -> None:
        """A call of a window's module by a micro-batch is over."""
        module = window.module() if number == 0 else None
        if module is not None:
            self._attributes.look(module)

    def forward_ended(self, number: int) -> None:
        """The forward of a micro-batch is over."""
        self._caches.pop(number, None)
        if number == 0:
            self._attributes.forward_has_ended()
        if number == 0 and self._counted is not None:
            self._counted.remember()
            self._room.measured(self._counted.nbytes)
            for window in list(self._inputs):
                self._look_for_edits(window)
            self._recompute = not self._fits()

    def end(self) -> None:
        """The call is over. The hooks on a graph that an error has left lead here: it would keep itself alive."""
        self._inputs.clear()

    def _look_for_edits(self, window: Window) -> None:
        """Whether the first micro-batch has edited in place what this window's module had been called with: a second
        run would get other arguments."""
        if any(tensor._version != version for tensor, version in self._inputs.pop(window, ())):
            self._room.edited.add(window)


def _kind_of_call(window: Window, module: nn.Module, given: Iterable[Any]) -> Hashable:
    """Calls of one module that have this in common keep as much, unless the program changes a setting of a layer."""
    weights = (handle.tensor for handle in window.handles())
    trained = sum(weight is not None and past_doors(requires_grad_of, (weight,)) for weight in weights)
    return module.training, trained, *map(_kind_of_value, given)


def _kind_of_value(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, (bool, str)) else None


class Counted:
    """The bytes that autograd saves in calls of windows: each call is counted that is of another kind than those
    before, which costs a call of Python for each tensor.

    Attributes:
        nbytes: of all that was saved on the device that computes, but for weights.
    """

    def __init__(self, pager: PagerPort) -> None:
        self.nbytes = 0
        self.is_open = False
        self._pager, self._room = pager, pager.order.activations
        self._seen: set[int] = set()
        self._new: list[tuple[Window, Hashable, int]] = []

    def call(self, window: Window, kind: Hashable) -> CountedCall | None:
        """A call of a window's module begins. None inside another one, and where hooks of the program decide what
        becomes of saved tensors."""
        below = self._pager.hooks.below
        top = top_saved_tensors_hooks(True)
        mine = None if top is None else getattr(top[0], "__self__", None)
        if self.is_open or (top is not None and not (type(mine) is SavedTensorHooks and mine.below is below)):
            return None
        self.is_open = True
        known = None if below is not None else self._room.known(window, kind)  # else what leaves is never the same
        if known is not None:
            self.nbytes += known
            return CountedCall(self, window, kind, hooked=False)
        hooks = (self._pack, SavedTensor.checked) if below is None else (self._pack_below, below[1])
        push_saved_tensors_hooks(*hooks)
        return CountedCall(self, window, kind, hooked=True)

    def ended(self, call: CountedCall) -> None:
        """A call is over."""
        self.is_open = False
        if not call.hooked:
            return
        top = top_saved_tensors_hooks(True)
        if top is not None and getattr(top[0], "__self__", None) is self:
            pop_saved_tensors_hooks()
        self._new.append((call.window, call.kind, self.nbytes - call.before))

    def remember(self) -> None:
        """The forward is over, so all its calls have come to their ends."""
        for window, kind, nbytes in self._new:
            self._room.counted(window, kind, nbytes)

    def _pack_below(self, tensor: Tensor) -> Any:
        """Activations are offloaded: what leaves takes no memory."""
        packed = self._pager.hooks.below[0](tensor) if self._pager.hooks.below is not None else None
        if type(packed) is SavedTensor:
            self._count(tensor)
        return packed

    def _pack(self, tensor: Tensor) -> SavedTensor:
        self._count(tensor)
        return SavedTensor(tensor)

    def _count(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and tensor.device == self._pager.memory.device:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage._cdata not in self._pager.storages:
                self._seen.add(storage._cdata)  # all of them live until backward
                self.nbytes += storage.nbytes()


class CountedCall:
    """One call of a window's module.

    Attributes:
        before: the bytes that were counted before it.
        hooked: whether what it saves is counted; else it is known.
    """

    def __init__(self, counted: Counted, window: Window, kind: Hashable, *, hooked: bool) -> None:
        self._counted = counted
        self.window, self.kind, self.hooked = window, kind, hooked
        self.before = counted.nbytes

    def close(self) -> None:
        """It is over."""
        self._counted.ended(self)
