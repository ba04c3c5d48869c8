"""In which order activations that have left come back, and what is known of each.

[Note: the order of return] Backward goes through a graph in reverse, so what was saved last is needed first. Each
tensor that is saved gets a number, one higher than the one before. What has the highest number of those that backward
has not used yet comes next; the lowest one leaves memory first. For example, with room for two of five block inputs::

    forward    saves 1, 2, 3, 4, 5: 1, 2 and 3 are written to NVMe and leave; 4 and 5 are in memory
    backward   uses 5: its room is free, and 3 is read ahead; uses 4: 2 is read ahead; uses 3; ...

Another order (micro-batches that take turns, a second backward) costs waits, never bits. A second use of a number says
that a graph goes backward once more: it and all that are lower are to come again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from deepoffload.activations.copies import Brought
from deepoffload.memory.block import Block
from deepoffload.params.saved import counter_of

Call = Callable[[], object]
"""A weak reference to a running call of the model."""


class Kept:
    """The bytes of one storage that has left.

    Attributes:
        counter: has the in-place counter of the tensor that was saved first. Another tensor over the storage may have
            its own: ``torch.unsafe_chunk`` makes such ones.
        call: of the model that saved it; None when that is over.
        numbers: of the saved tensors that show it and still exist.
        whole: its bytes where the program computes, while several saved tensors may ask for them in a row.
    """

    __slots__ = ("block", "storage", "address", "counter", "version", "call", "numbers", "whole")

    def __init__(self, block: Block, tensor: Tensor, call: Call) -> None:
        storage = tensor.untyped_storage()
        self.block = block
        self.storage = StorageWeakRef(storage)
        self.address = storage._cdata
        self.counter = counter_of(tensor)
        self.version = tensor._version
        self.call = call
        self.numbers: set[int] = set()
        self.whole: Brought | None = None


class OrderOfReturn:
    """The eviction policy of the store's memory. See [Note: the order of return] at the top of this file.

    Attributes:
        to_come: the numbers of saved tensors that backward has not used yet, ascending, and their storages.
    """

    predicted: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.to_come: dict[int, Kept] = {}
        self._next: dict[int, list[int]] = {}

    def comes(self, number: int, kept: Kept) -> None:
        """It is to come, before all others."""
        self.to_come[number] = kept
        self._next.setdefault(kept.block.id, []).append(number)

    def used(self, number: int, kept: Kept) -> None:
        """It has come, or will not come any more."""
        if self.to_come.pop(number, None) is not None:
            numbers = self._next[kept.block.id]
            numbers.remove(number)
            if not numbers:
                del self._next[kept.block.id]

    def again(self, number: int, every: Sequence[Kept]) -> None:
        """A graph goes backward once more: ``number`` and the lower ones of ``every`` are to come again."""
        coming = dict(self.to_come)
        coming |= {each: kept for kept in every for each in kept.numbers if each <= number}
        self.to_come, self._next = {}, {}
        for each in sorted(coming):
            self.comes(each, coming[each])

    def is_to_come(self, kept: Kept) -> bool:
        return kept.block.id in self._next

    def next_use(self, block_id: int) -> float:
        numbers = self._next.get(block_id)
        return math.inf if numbers is None else -numbers[-1]

    def before_leaving(self, block: Block) -> None:
        """Nothing stays for good here."""

    def wanted_together(self) -> Sequence[Block]:
        return ()
