"""The graph that autograd has recorded of one micro-batch, and which leg of the work has made each node of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from deepoffload.params.torch_private import AccumulateGrad, sequence_number

_HOST = torch.device("cpu")


class LeafUse(NamedTuple):
    """A node that makes gradients of leaves, such as weights. leaves: with the number of the output that each gets."""

    node: Any
    sequence: int
    leaves: tuple[tuple[int, Tensor], ...]

    def leads_further(self) -> bool:
        """Whether the node makes gradients of something else, too."""
        return sum(following is not None for following, _ in self.node.next_functions) > len(self.leaves)


def runs_backward(node: Any) -> bool:
    """Whether a node calls backward itself, as that of a reentrant checkpoint does. Which weights it uses is not known,
    and it cannot run inside ``torch.autograd.grad``."""
    if not isinstance(node, BackwardCFunction):
        return False
    code = getattr(unwrap(node._forward_cls.backward), "__code__", None)  # type: ignore[attr-defined]
    return code is None or "backward" in code.co_names


def _device_of(node: Any) -> torch.device:
    """On which a node computes, as autograd finds it: that of the first gradient it gets that is not on the CPU."""
    devices = (one.device for one in node._input_metadata)
    return next((device for device in devices if device.type != "cpu"), _HOST)


class LossGraph:
    """All nodes behind a loss, but those of leaves; none where there is no loss. Nodes have the numbers in whose order
    they were made.

    The objects keep the nodes alive, and what these keep: forget them before a backward.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        self.nodes: list[tuple[Any, int]] = []
        self.uses: list[LeafUse] = []
        self._in_several_threads: bool | None = None
        root = None if loss is None else loss.grad_fn
        waiting: list[Any] = [] if root is None else [root]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            sequence, leaves = node._sequence_nr(), []
            for output, (following, _) in enumerate(node.next_functions):
                if type(following) is AccumulateGrad:
                    leaves.append((output, following.variable))
                elif following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
            self.nodes.append((node, sequence))
            if leaves:
                self.uses.append(LeafUse(node, sequence, tuple(leaves)))

    def runs_in_several_threads(self) -> bool:
        """Whether backward computes on several devices, or on the CPU and a device. Autograd has a thread for each, and
        so there is no order among all nodes."""
        if self._in_several_threads is None:
            has_devices = torch.accelerator.is_available()
            self._in_several_threads = has_devices and len({_device_of(node) for node, _ in self.nodes}) > 1
        return self._in_several_threads

    def leaves(self) -> Iterable[Tensor]:
        """Once for each use."""
        return (leaf for use in self.uses for _, leaf in use.leaves)

    def ends_at(self, doors: set[Any], begin: int) -> bool:
        """Whether the loss was made from number ``begin`` on, and such nodes lead to older ones only by ``doors``."""
        return any(sequence >= begin for _, sequence in self.nodes[:1]) and all(
            following is None or type(following) is AccumulateGrad or following._sequence_nr() >= begin
            for node, sequence in self.nodes
            if sequence >= begin and node not in doors
            for following, _ in node.next_functions
        )

    def runs_backward_from(self, begin: int) -> bool:
        """Whether one of the nodes that were made from number ``begin`` on calls backward itself."""
        return any(sequence >= begin and runs_backward(node) for node, sequence in self.nodes)

    def keep_before(self, begin: int, more: Collection[LeafUse]) -> None:
        """Forget the nodes that were made from number ``begin`` on, but for those that make these uses."""
        kept = {use.node for use in more}
        self.nodes = [(node, sequence) for node, sequence in self.nodes if sequence < begin or node in kept]
        self.uses = [use for use in self.uses if use.sequence < begin or use.node in kept]


class Leg(NamedTuple):
    """What a micro-batch has done from one of its visits to the next one. ``visit``: its index; -1: before all."""

    number: int
    visit: int


class Legs:
    """In which order legs of several micro-batches have run in this thread, by the numbers that nodes get here."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._legs: list[Leg | None] = []

    def begin(self, leg: Leg | None) -> None:
        """What runs from now on. None: none of the micro-batches."""
        self._begins.append(sequence_number())
        self._legs.append(leg)

    def index_of(self, sequence: int, number: int) -> int:
        """Which leg has made a node; -1 where that was none of micro-batch ``number``."""
        found = bisect_right(self._begins, sequence) - 1
        leg = self._legs[found] if found >= 0 else None
        return found if leg is not None and leg.number == number else -1

    def visit_of(self, found: int) -> int:
        """Which visit of its micro-batch the leg ``found`` begins with."""
        leg = self._legs[found]
        return -1 if leg is None else leg.visit

    def shifts(self, places: dict[Leg, int]) -> list[int]:
        """What to add to the numbers of each leg's nodes, so that these follow each other by their places, and at
        one place from the last micro-batch to the first: backward then takes the first one first."""
        lengths = [end - begin for begin, end in zip(self._begins, self._begins[1:], strict=False)]

        def key(found: int) -> tuple[int, int, int]:
            leg = self._legs[found]
            return (-1, 0, found) if leg is None else (places[leg], -leg.number, found)

        shifts, begin = [0] * len(self._begins), self._begins[0] if self._begins else 0
        for found in sorted(range(len(lengths)), key=key):
            shifts[found] = begin - self._begins[found]
            begin += lengths[found]
        return shifts
