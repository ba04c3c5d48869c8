"""The graph that autograd has recorded of one micro-batch, and which leg of the work has made each node of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from inspect import unwrap
from itertools import accumulate, compress, groupby
from operator import itemgetter
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

    The objects keep the nodes alive, and what these keep: forget them before a backward. Lists side by side hold what
    is known of each: thousands of small objects would call Python's garbage collector again and again.

    Attributes:
        nodes, sequences: each node, and its number.
        programs: at which places of these the nodes of functions are that are written in Python.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        self.nodes: list[Any] = []
        self.sequences: list[int] = []
        self.programs: list[int] = []
        self._users: list[int] = []
        self._outputs: list[int] = []
        self._leaves: list[Tensor] = []
        self._in_several_threads: bool | None = None
        root = None if loss is None else loss.grad_fn
        waiting: list[Any] = [] if root is None else [root]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            place = len(self.nodes)
            for output, (following, _) in enumerate(node.next_functions):
                if type(following) is AccumulateGrad:
                    self._users.append(place)
                    self._outputs.append(output)
                    self._leaves.append(following.variable)
                elif following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
            if isinstance(node, BackwardCFunction):
                self.programs.append(place)
            self.nodes.append(node)
            self.sequences.append(node._sequence_nr())

    def uses(self) -> Iterator[LeafUse]:
        """One for each node that makes gradients of leaves."""
        for place, of_node in groupby(zip(self._users, self._outputs, self._leaves, strict=True), key=itemgetter(0)):
            leaves = tuple((output, leaf) for _, output, leaf in of_node)
            yield LeafUse(self.nodes[place], self.sequences[place], leaves)

    def runs_in_several_threads(self) -> bool:
        """Whether backward computes on several devices, or on the CPU and a device. Autograd has a thread for each, and
        so there is no order among all nodes."""
        if self._in_several_threads is None:
            has_devices = torch.accelerator.is_available()
            self._in_several_threads = has_devices and len({_device_of(node) for node in self.nodes}) > 1
        return self._in_several_threads

    def leaves(self) -> Sequence[Tensor]:
        """Once for each use."""
        return self._leaves

    def ends_at(self, doors: set[Any], begin: int) -> bool:
        """Whether the loss was made from number ``begin`` on, and such nodes lead to older ones only by ``doors``."""
        return any(sequence >= begin for sequence in self.sequences[:1]) and all(
            following is None or type(following) is AccumulateGrad or following._sequence_nr() >= begin
            for node in self.made_from(begin)
            if node not in doors
            for following, _ in node.next_functions
        )

    def made_from(self, begin: int) -> Iterator[Any]:
        """The nodes that were made from number ``begin`` on."""
        return (node for node, sequence in zip(self.nodes, self.sequences, strict=True) if sequence >= begin)

    def leaves_before(self, begin: int) -> Iterator[Tensor]:
        """Those of nodes that were made before number ``begin``, once for each use."""
        uses = zip(self._users, self._leaves, strict=True)
        return (leaf for place, leaf in uses if self.sequences[place] < begin)

    def runs_backward_from(self, begin: int) -> bool:
        """Whether one of the nodes that were made from number ``begin`` on calls backward itself."""
        return any(self.sequences[place] >= begin and runs_backward(self.nodes[place]) for place in self.programs)

    def keep_before(self, begin: int, more: Collection[LeafUse]) -> None:
        """Forget the nodes that were made from number ``begin`` on, but for those that make these uses."""
        kept = {use.node for use in more}
        stays = [number < begin or node in kept for node, number in zip(self.nodes, self.sequences, strict=True)]
        places = list(accumulate(stays, initial=0))  # where each stands then
        uses = [stays[place] for place in self._users]
        self._users = [places[place] for place in compress(self._users, uses)]
        self._outputs = list(compress(self._outputs, uses))
        self._leaves = list(compress(self._leaves, uses))
        self.programs = [places[place] for place in self.programs if stays[place]]
        self.nodes = list(compress(self.nodes, stays))
        self.sequences = list(compress(self.sequences, stays))


class Legs:
    """In which order several micro-batches have run in this thread. A leg is what one of them has done from one of its
    visits to the next one; autograd numbers its nodes as they are made here, so each leg has made those from a number
    on."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._numbers: list[int] = []
        self._visits: list[int] = []

    def begin(self, number: int, visit: int) -> None:
        """What runs from now on.

        Args:
            number: of the micro-batch; -1: none of them.
            visit: the index of the visit that the leg begins with; -1: before all.
        """
        self._begins.append(sequence_number())
        self._numbers.append(number)
        self._visits.append(visit)

    def indices_of(self, sequences: Iterable[int], number: int) -> list[int] | None:
        """Which leg has made each of the nodes with these numbers. None where one was none of micro-batch
        ``number``."""
        found = [bisect_right(self._begins, sequence) - 1 for sequence in sequences]
        every = set(found)
        return found if -1 not in every and all(self._numbers[leg] == number for leg in every) else None

    def visit_of(self, found: int) -> int:
        """Which visit of its micro-batch the leg ``found`` begins with."""
        return self._visits[found]

    def shifts(self, places: dict[tuple[int, int], int]) -> list[int]:
        """What to add to the numbers of each leg's nodes, so that these follow each other by their places, and at
        one place from the last micro-batch to the first: backward then takes the first one first.

        Args:
            places: by micro-batch and visit.
        """
        lengths = [end - begin for begin, end in zip(self._begins, self._begins[1:], strict=False)]

        def key(found: int) -> tuple[int, int, int]:
            number = self._numbers[found]
            return (-1, 0, found) if number < 0 else (places[number, self._visits[found]], -number, found)

        shifts, begin = [0] * len(self._begins), self._begins[0] if self._begins else 0
        for found in sorted(range(len(lengths)), key=key):
            shifts[found] = begin - self._begins[found]
            begin += lengths[found]
        return shifts
