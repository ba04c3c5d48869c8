"""Ranks that are only planned for: what the plan of a model asks of their transport, without any process."""

from __future__ import annotations

from dataclasses import dataclass

from deepoffload.ranks.exchange import Reduction, group_scratch_bytes, memory_scratch_bytes
from deepoffload.ranks.places import RankMap
from deepoffload.ranks.transport import MEMORY


@dataclass(frozen=True)
class PlannedExchange:
    """The sizes of transfers by ``transport`` (``"group"`` or ``"memory"``); see
    :class:`deepoffload.ranks.exchange.TransferSizes`."""

    transport: str
    ranks: RankMap

    def scratch_bytes(self, reduction: Reduction) -> int:
        if self.transport == MEMORY:
            return memory_scratch_bytes(reduction, self.ranks.rank)
        return group_scratch_bytes(reduction)
