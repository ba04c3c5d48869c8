"""How one tensor of a unit is cut for several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from deepoffload.memory.form import SHARD, Form
from deepoffload.params.shards import OwnedRun, ShardLayout


@dataclass(frozen=True, slots=True)
class TensorCut:
    """One tensor of a layout, as one rank sees it.

    Attributes:
        layout: of the block that the tensor lies in.
        tensor: its number there.
        rank: this one.
    """

    layout: ShardLayout
    tensor: int
    rank: int

    def run(self) -> OwnedRun | None:
        """The consecutive elements that this rank owns, None where it owns none."""
        return self.layout.run_of(self.rank, self.tensor)

    def own_elements(self) -> slice:
        """The elements that this rank owns, in the order of the tensor's memory."""
        run = self.run()
        return slice(0, 0) if run is None else slice(run.start, run.start + run.numel)

    def shard_offset(self, start: int) -> int:
        """Where in this rank's shard element ``start`` lies, in bytes. Raises ``ValueError`` where another rank owns
        it."""
        return self.layout.shard_offset(self.rank, self.tensor, start)

    def form(self) -> Form:
        """Where the tensor lies in its block: this rank's run, of a whole tensor that is shown."""
        numel, itemsize, _ = self.layout.tensors[self.tensor]
        run, shown_at = self.run(), self.layout.offsets[self.tensor]
        if run is None:
            return Form(0, 0, shown_at, numel * itemsize, SHARD)
        return Form(run.shard_offset, run.numel * itemsize, shown_at, numel * itemsize, SHARD)


def cuts_of(layout: ShardLayout, rank: int) -> list[TensorCut]:
    """All tensors of a layout, as one rank sees them."""
    return [TensorCut(layout, tensor, rank) for tensor in range(len(layout.tensors))]


Place = int | TensorCut
"""Where a tensor lies in its block: at an offset in bytes, stored as it is shown, or cut for several ranks."""
