"""How long something takes that all ranks do together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed(row: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of all ranks together."""
    dist.barrier()
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    row()
    seconds = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    used = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return float(seconds), float(used)
