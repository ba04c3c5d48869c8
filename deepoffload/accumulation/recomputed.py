"""A call of a unit's module of which autograd keeps the arguments alone: backward runs the module again before it needs
what the call has saved.

The means is torch's own activation checkpoint without reentrant autograd, put around the call by the window. The graph
is that of the forward, so a backward has the same nodes, the same sums and the same bits. Random numbers, autocast and
the default device are as they were in the forward: torch sees to it. Five things are ours, because the program has
not asked for a checkpoint and its modules need not be written for one:

- Buffers that the call changes, such as running statistics, are lent to the second run as they were before the first
  one, and nothing of what it does to them stays.
- Python's and NumPy's generators, and those that its modules hold, stand where they stood (``own_generators``).
- So are attributes of modules anywhere in the model, as far as its first forward has changed them.
- A call that writes to its weights is not run again.
- A cache of keys and values (transformers makes one in each forward, also in training) is as empty in the second run as
  it was before the forward. Without one, attention computes with keys that lie otherwise in memory, and its backward
  rounds otherwise. A cache with a past cannot be taken back: such a call keeps its activations.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from deepoffload.accumulation.own_generators import OwnGenerators
from deepoffload.errors import UnsupportedError
from deepoffload.params.kept_attributes import KeptAttributes, edits_of_weight
from deepoffload.params.torch_private import checkpoint_around, outside_user_modes
from deepoffload.params.torch_thread import lend_process, process_now

_COPIED_BYTES = 1 << 20
"""Buffers up to this size are compared by value: native kernels change running statistics and move no version."""


def second_run_differed(error: BaseException) -> bool:
    """Whether an error of a backward says that a second run had other arguments than the first one, or went another
    way."""
    edited = isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
    return edited or isinstance(error, CheckpointError)


class EmptyCache:
    """A cache of keys and values as it was before the forward."""

    def __init__(self, cache: Any) -> None:
        self._then = copy.deepcopy(cache)

    def again(self) -> Any:
        """Another one for each run."""
        return copy.deepcopy(self._then)


class Caches:
    """The caches of keys and values that the forward of one micro-batch has shown; None for those that had a past."""

    def __init__(self) -> None:
        self._empty: weakref.WeakKeyDictionary[Any, EmptyCache | None] = weakref.WeakKeyDictionary()

    def emptied(self, leaves: list[Any]) -> list[Any] | None:
        """The arguments of a call, with caches as they were; None where one had a past."""
        found = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
                if leaf not in self._empty:
                    self._empty[leaf] = EmptyCache(leaf) if int(leaf.get_seq_length()) == 0 else None
                leaf = self._empty[leaf]
                if leaf is None:
                    return None
            found.append(leaf)
        return found


class Recomputed:
    """From the begin of a call on. :meth:`close` is its end.

    Args:
        leaves, structure: the arguments of the call, flattened, as the second run is to get them.
        attributes: of the model's modules, that its forwards change.
        device: that computes.
    """

    def __init__(
        self, module: nn.Module, leaves: list[Any], structure: Any, attributes: KeptAttributes, device: torch.device
    ) -> None:
        self._module = module
        self._structure = structure
        self._attributes, self._then = attributes, attributes.now()
        self._process = process_now()
        self._buffers = _Buffers(module)
        self._generators = OwnGenerators(module)
        self._edits: list[tuple[int, int]] | None = _edits_in(module)
        once: dict[int, int] = {}
        self._places = [once.setdefault(id(leaf), len(once)) for leaf in leaves]
        given = [leaves[self._places.index(place)] for place in range(len(once))]
        with (
            outside_user_modes()
        ):  # torch sees to random numbers and autocast of the devices of tensors that it is given
            there = torch.empty(0, device=device)
        self._around: Iterator[None] | None = checkpoint_around(  # what runs between two calls of next() runs again
            self._run_again, True, noop_context_fn, "default", False, True, there, *given
        )
        next(self._around)

    def close(self) -> None:
        around, self._around = self._around, None
        if around is not None:
            next(around, None)
            self._buffers.compare()
            self._generators.forget_unused()
            if self._edits == _edits_in(self._module):
                self._edits = None

    def _run_again(self, _: Tensor, *given: Any) -> None:
        """What was one object is one again: attention computes otherwise where its query and its key are not."""
        again = [leaf.again() if type(leaf) is EmptyCache else _without_hooks(leaf) for leaf in given]
        args, kwargs = self._structure.unflatten(again[place] for place in self._places)
        name = type(self._module).__name__
        if self._edits is not None:
            raise UnsupportedError(
                f"{name}: its forward writes to its weights, and would do so again when it runs a second time; "
                'use activations="keep"'
            )
        with (
            ExitStack() as back,
            self._attributes.lent(self._then),
            self._buffers.as_they_were(name),
            self._generators.as_they_were(),
        ):
            lend_process(self._process, back)
            self._module(*args, **kwargs)


def _edits_in(module: nn.Module) -> list[tuple[int, int]]:
    """Of each weight. Equal after a call that has written to none."""
    return [edits_of_weight(weight) for weight in module.parameters()]


def _without_hooks(leaf: Any) -> Any:
    """A tensor on which the second run puts its hooks: the first one has put them on the argument itself."""
    if type(leaf) is Tensor and leaf.grad_fn is not None:
        return leaf.detach().requires_grad_()
    return leaf


class _Buffers:
    """The buffers of a module before a call that may change them."""

    def __init__(self, module: nn.Module) -> None:
        self._small: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._large: list[tuple[dict[str, Tensor | None], str, Tensor, int]] = []
        with outside_user_modes():
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if type(buffer) is Tensor and buffer.nbytes <= _COPIED_BYTES:
                        self._small.append((part._buffers, name, buffer, buffer.clone()))
                    elif buffer is not None:
                        self._large.append((part._buffers, name, buffer, buffer._version))

    def compare(self) -> None:
        """After the call: forget those that it has left alone."""
        with outside_user_modes():
            self._small = [
                (owner, name, buffer, before)
                for owner, name, buffer, before in self._small
                if owner.get(name) is not buffer or not torch.equal(buffer, before)
            ]
        self._large = [
            (owner, name, buffer, version)
            for owner, name, buffer, version in self._large
            if owner.get(name) is not buffer or buffer._version != version
        ]

    @contextmanager
    def as_they_were(self, module_name: str) -> Iterator[None]:
        """The module has copies of what its buffers held before the call."""
        if self._large:
            raise UnsupportedError(
                f"{module_name}: its forward changes the buffer {self._large[0][1]}, which is too large to be kept for "
                'a second run of it; use activations="keep"'
            )
        now = [(owner, name, owner.get(name)) for owner, name, _, _ in self._small]
        try:
            for owner, name, _, before in self._small:
                owner[name] = before.clone()
            yield
        finally:
            for owner, name, value in now:
                owner[name] = value
