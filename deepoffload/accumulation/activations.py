"""What the forwards of one call of ``accumulate`` keep for their backwards: all activations, or the tensors between
units."""

from __future__ import annotations

from collections import defaultdict
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
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
    tree_flatten,
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
        leaves, structure = tree_flatten((args, kwargs))
        if counted is not None:
            self._inputs[window] = [
                (leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()
            ]
            return counted if counted.open() else None
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


class Counted:
    """Keeps what autograd saves in calls of windows, and counts the bytes.

    Attributes:
        nbytes: of all that was saved on the device that computes, but for weights.
    """

    def __init__(self, pager: PagerPort) -> None:
        self.nbytes = 0
        self._pager = pager
        self._seen: set[int] = set()
        below = pager.hooks.below
        self._hooks = (self._pack, SavedTensor.checked) if below is None else (self._pack_below, below[1])

    def open(self) -> bool:
        """A call begins. False where hooks of the program decide what becomes of saved tensors."""
        top = top_saved_tensors_hooks(True)
        mine = None if top is None else getattr(top[0], "__self__", None)
        if top is not None and not (type(mine) is SavedTensorHooks and mine.below is self._pager.hooks.below):
            return False
        push_saved_tensors_hooks(*self._hooks)
        return True

    def close(self) -> None:
        """A call is over."""
        top = top_saved_tensors_hooks(True)
        if top is not None and getattr(top[0], "__self__", None) is self:
            pop_saved_tensors_hooks()

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
