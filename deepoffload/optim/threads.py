"""How many threads a native pass runs on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from deepoffload.machine import usable_cores


def num_threads() -> int:
    """torch's number of threads, but no more than the container and the CPU mask let run at once.

    Torch looks at the mask only: with a quota of two cores on a machine of 64 it starts 64 threads, of which most would
    wait for each other.
    """
    return max(1, min(torch.get_num_threads(), _usable_cores()))


@lru_cache(maxsize=1)
def _usable_cores() -> int:
    return usable_cores(Path("/"))


def landing_threads() -> int:
    """The same where the program's threads launch work for a device meanwhile: two cores are theirs."""
    return max(1, num_threads() - 2)
