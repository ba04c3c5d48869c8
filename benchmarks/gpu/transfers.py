"""Host memory to the device and back: our copies next to plain ones from memory that torch has pinned."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

if "--simulate" in sys.argv:
    from tests.support.simulated_gpu import install

    install(devices=1)

from deepoffload.copies.accelerator import Accelerator
from deepoffload.copies.pinning import PinnedArena
from deepoffload.memory.arena import Arena

ROUNDS = 7


def rate(accelerator: Accelerator, copy: Callable[[], None], nbytes: int) -> float:
    """Bytes per second of ``copy``, the median of several rounds."""
    seconds = []
    for _ in range(ROUNDS + 1):
        accelerator.synchronize()
        started = time.perf_counter()
        copy()
        accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return nbytes / statistics.median(seconds[1:])


def copies(
    accelerator: Accelerator, host: torch.Tensor, there: list[torch.Tensor], parts: list[tuple[int, int]]
) -> dict[str, Callable[[], None]]:
    """``parts``, as (offset, bytes), are what may be copied at once."""
    ranges = [slice(start, start + nbytes) for start, nbytes in parts]

    def bring(chosen: list[slice] = ranges) -> None:
        with accelerator.on(accelerator.copy_in):
            for part in chosen:
                there[0][part].copy_(host[part], non_blocking=True)

    def take(chosen: list[slice] = ranges) -> None:
        with accelerator.on(accelerator.copy_out):
            for part in chosen:
                host[part].copy_(there[1][part], non_blocking=True)

    def both() -> None:
        bring(ranges[::2])
        take(ranges[1::2])

    return {"in": bring, "out": take, "both": both}


def main() -> None:
    nbytes = int(sys.argv[1])
    accelerator = Accelerator(torch.accelerator.current_accelerator())
    arena = Arena(nbytes)
    pinned_arena = PinnedArena(accelerator, arena)
    locked = pinned_arena.lock(0, nbytes)
    report: dict[str, Any] = {"bytes": nbytes, "locked_bytes": pinned_arena.locked_bytes}
    ours = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory="--simulate" not in sys.argv)
    there = [torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device) for _ in range(2)]
    halves = [(0, nbytes // 2), (nbytes // 2, nbytes - nbytes // 2)]
    for name, host, parts in (("ours", ours, locked if len(locked) > 1 else halves), ("pinned", pinned, halves)):
        for direction, copy in copies(accelerator, host, there, parts).items():
            report[f"{name}_{direction}_bytes_per_s"] = rate(accelerator, copy, nbytes)
    for direction in ("in", "out", "both"):
        report[f"{direction}_ratio"] = (
            report[f"ours_{direction}_bytes_per_s"] / report[f"pinned_{direction}_bytes_per_s"]
        )
    del ours
    pinned_arena.release()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
