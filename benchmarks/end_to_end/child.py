"""One contender-case in a process of its own: `child.py SPEC` prints a JSON line when it is ready, and one per step."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.common.gpt import SHAPES, tokens_of
from benchmarks.end_to_end.meter import read_counters

MODULES = {side: f"benchmarks.end_to_end.side_{side}" for side in ("ours", "plain", "deepspeed")}


class Trainer(Protocol):
    """A model, its optimizer, and what moves its bytes. ``together``: it takes all micro-batches of a step at once,
    by ``accumulate``; else ``loss`` and ``backward`` of each are called."""

    together: bool

    def accumulate(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Forwards and backwards; the losses."""

    @property
    def notes(self) -> str:
        """For people."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...

    def backward(self, loss: Tensor, accumulate: int) -> None: ...

    def update(self, last: bool) -> None:
        """Called after every backward; ``last`` after that of the last micro-batch of the step."""

    def finish(self) -> None:
        """Everything that was put off is done when this returns."""

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def one_step(trainer: Trainer, work: dict[str, Any], number: int) -> dict[str, Any]:
    """One optimizer step and what it cost. Of micro-batches that run together, ``forward_s`` is that of both passes."""
    accumulate, forward_s, backward_s, update_s, losses = work["accumulate"], 0.0, 0.0, 0.0, []
    batches = [tokens_of(number * accumulate + micro, work["batch"], work["seq"]) for micro in range(accumulate)]
    before, started = read_counters(), time.perf_counter()
    if trainer.together:
        losses = [loss.item() for loss in trainer.accumulate(batches)]
        forward_s = time.perf_counter() - started
        trainer.update(True)
        update_s, batches = time.perf_counter() - started - forward_s, []
    for micro, (tokens, targets) in enumerate(batches):
        at_start = time.perf_counter()
        loss = trainer.loss(tokens, targets)
        after_forward = time.perf_counter()
        trainer.backward(loss, accumulate)
        after_backward = time.perf_counter()
        trainer.update(micro == accumulate - 1)
        forward_s += after_forward - at_start
        backward_s += after_backward - after_forward
        update_s += time.perf_counter() - after_backward
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    used = read_counters() - before
    return {
        "step": number,
        "seconds": seconds,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "update_s": update_s,
        "loss": sum(losses) / accumulate,
        "read_bytes": used.read_bytes,
        "written_bytes": used.written_bytes,
        "cpu_s": used.own_cpu_s,
        "foreign_cpu_share": max(0.0, used.busy_cpu_s - used.own_cpu_s) / seconds / (os.cpu_count() or 1),
        "foreign_disk_bytes": max(0, used.all_disk_bytes - used.read_bytes - used.written_bytes),
        "stats": trainer.stats(),
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Libraries print to stdout as they like; the lines go to where stdout was.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = spec["work"]
    torch.set_num_threads(work["threads"])
    side = importlib.import_module(MODULES[spec["side"]])
    nbytes = spec["settings"].pop("beside_bytes", 0)
    # by name: it imports deepoffload, which DeepSpeed's own environment lacks
    beside = importlib.import_module("benchmarks.end_to_end.mover").Beside(spec["path"], nbytes) if nbytes else None
    started = time.perf_counter()
    trainer: Trainer = side.make(SHAPES[work["size"]], work, spec["settings"], spec["path"])
    print(json.dumps({"ready_s": time.perf_counter() - started, "stats": trainer.stats()}), file=lines)
    quiet = 0
    for number in range(work["warmup"] + work["steps_max"]):
        make = partial(one_step, trainer, work, number)
        step = make() if beside is None else beside.step(make)
        print(json.dumps(step), file=lines)
        quiet += number >= work["warmup"] and step["foreign_cpu_share"] <= work["foreign_share_max"]
        if quiet == work["steps"]:
            break
    started = time.perf_counter()
    trainer.finish()
    print(json.dumps({"finish_s": time.perf_counter() - started, "notes": trainer.notes}), file=lines)
    trainer.close()


if __name__ == "__main__":
    main()
