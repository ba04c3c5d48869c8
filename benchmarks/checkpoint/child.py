"""One trained model in a separate process: does what each line of its input says, and answers with what it cost."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.training import Training
from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.child import MODULES, one_step
from benchmarks.end_to_end.meter import read_counters


def synced(folder: Path) -> None:
    """What others have saved is on the disk, as ours is."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def uncached(folder: Path) -> None:
    """Loading reads from the disk, not from what saving has left in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def of_deepspeed(trainer: Any, folder: Path) -> dict[str, Callable[[], object]]:
    """Saving and loading, by name."""

    def save() -> None:
        trainer.engine.save_checkpoint(str(folder), "one")
        synced(folder)

    return {"save": save, "load": lambda: trainer.engine.load_checkpoint(str(folder), "one")}


def of_ours(trainer: Any, training_state: Any, folder: Path) -> dict[str, Callable[[], object]]:
    """Saving and loading, by name; also with torch."""
    torch_file = folder / "state.pt"

    def torch_save() -> None:
        torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, torch_file)
        synced(folder)

    def torch_load() -> None:
        states = torch.load(torch_file)
        trainer.model.load_state_dict(states["model"])
        trainer.optimizer.load_state_dict(states["optimizer"])

    return {
        "save": lambda: training_state.save(folder, "one"),
        "load": lambda: training_state.load(folder, "one"),
        "torch_save": torch_save,
        "torch_load": torch_load,
    }


def measured(action: Callable[[], object], folder: Path) -> dict[str, Any]:
    uncached(folder)
    before, started = read_counters(), time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    used = read_counters() - before
    return {
        "seconds": seconds,
        "read_bytes": used.read_bytes,
        "written_bytes": used.written_bytes,
        "cpu_s": used.own_cpu_s,
        "foreign_cpu_share": max(0.0, used.busy_cpu_s - used.own_cpu_s) / seconds / (os.cpu_count() or 1),
        "foreign_disk_bytes": max(0, used.all_disk_bytes - used.read_bytes - used.written_bytes),
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Libraries print to stdout as they like; the lines go to where stdout was.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work, folder = spec["work"], Path(spec["path"]) / "checkpoints"
    torch.set_num_threads(work["threads"])
    trainer = importlib.import_module(MODULES[spec["side"]]).make(
        SHAPES[work["size"]], work, spec["settings"], spec["path"]
    )
    one_step(trainer, work, 0)  # optimizer state exists from here on
    trainer.finish()
    folder.mkdir()
    training: Training | None = None
    if spec["side"] == "deepspeed":
        actions = of_deepspeed(trainer, folder)
    else:
        state = importlib.import_module("deepoffload").TrainingState(trainer.model, trainer.optimizer)
        actions = of_ours(trainer, state, folder)
        training = Training(trainer, work, state)
    print(json.dumps({"ready": True}), file=lines)
    try:
        for line in sys.stdin:
            name = line.strip()
            if training is not None and name == "steps":
                answer = training.steps()
            elif training is not None and name in ("background", "torch_async"):
                training.step()  # the call meets updates that are still to come
                save = training.background if name == "background" else training.torch_async
                answer = measured(partial(save, folder), folder) | training.saved
            else:
                answer = measured(actions[name], folder)
                answer["loss"] = one_step(trainer, work, 1)["loss"]
            print(json.dumps(answer), file=lines)
    finally:
        trainer.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
