"""One rank of `python -m benchmarks.ranks saving`; rank 0 prints a JSON line at the end of each phase."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.gpt import SHAPES, tokens_of
from benchmarks.end_to_end.side_ours import make
from deepoffload import TrainingState
from deepoffload.io.engine import BACKENDS
from deepoffload.io.probe import cached_bandwidth

WORK: dict[str, Any] = {"accumulate": 1, "seq": 128, "lr": 1e-4, "clip": 1.0}
STEPS = 3


def main() -> None:
    spec = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    folder = Path(spec["path"]) / "saved_by_ranks"

    def told(phase: str, **more: Any) -> None:
        dist.barrier()
        if rank == 0:
            print(json.dumps({"phase": phase, **more}), file=lines)
        dist.barrier()

    settings = {"host_budget": spec["host_budget"], "disk": True}
    trainer = make(SHAPES[spec["size"]], WORK, settings, spec["path"])
    found = (cached_bandwidth(spec["path"], backend) for backend in BACKENDS)
    disk = next(rate for rate in found if rate is not None)  # the engine has measured it
    state = TrainingState(trainer.model, trainer.optimizer)
    for step in range(STEPS):
        tokens, targets = tokens_of(step * world_size + rank, 1, WORK["seq"])
        trainer.backward(trainer.loss(tokens, targets), 1)
        trainer.update(True)
    trainer.finish()
    told("train")
    try:
        for _ in range(spec["rounds"]):
            for phase, call in (("save", state.save), ("load", state.load)):
                dist.barrier()
                began_s = time.perf_counter()
                call(folder)
                dist.barrier()
                seconds = time.perf_counter() - began_s
                nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                told(phase, seconds=seconds, nbytes=nbytes, disk_bytes_per_s=disk.mixed_bytes_per_s)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    trainer.close()


if __name__ == "__main__":
    main()
