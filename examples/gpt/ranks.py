"""Which of the processes that torchrun has started this is; one alone without it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process's number, and how many there are."""

    rank: int
    world_size: int

    def mean(self, value: float) -> float:
        """Of what all ranks give. Collective."""
        if self.world_size == 1:
            return value
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        dist.all_reduce(values)
        return float(values.mean())


def this_rank() -> Ranks:
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
