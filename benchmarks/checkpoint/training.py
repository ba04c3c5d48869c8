"""Steps next to a save in the background, and steps that become durable: the child's part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint

from benchmarks.end_to_end.cases import BYTES
from benchmarks.end_to_end.child import one_step

STEPS = 4
"""That count, of a group."""
SAVE_STEPS_MAX = 200
PER_STEP = ("seconds", "read_bytes", "written_bytes", "cpu_s", "foreign_cpu_share", "foreign_disk_bytes")


class Training:
    """Steps of a trainer of ours. They are committed where its engine makes them durable.

    Attributes:
        saved: what the last save in the background cost.
    """

    def __init__(self, trainer: Any, work: dict[str, Any], training_state: Any) -> None:
        self._trainer = trainer
        self._work = work
        self._state = training_state
        self._durability = trainer.engine.durability
        self._number = 1
        self.saved: dict[str, Any] = {}

    def step(self) -> dict[str, Any]:
        """What it cost, with its commit."""
        started = time.perf_counter()
        cost = one_step(self._trainer, self._work, self._number)
        if self._durability is not None:
            self._state.commit()
        self._number += 1
        return {**cost, "seconds": time.perf_counter() - started}

    def steps(self) -> dict[str, Any]:
        """A group of steps: what the median one cost. The first one has no update to make, and does not count."""
        self.step()
        costs, syncs = [], []
        for _ in range(STEPS):
            costs.append(self.step())
            if self._durability is not None:
                syncs.append(self._durability.store.sync_s)
        if self._durability is not None:
            self._state.commit(wait=True)
        self._trainer.finish()
        return {
            **{key: statistics.median(cost[key] for cost in costs) for key in PER_STEP},
            "steps_s": [cost["seconds"] for cost in costs],
            "syncs_s": syncs,
            "losses": [cost["loss"] for cost in costs],
        }

    def background(self, folder: Path) -> None:
        """A save that does not wait, and steps until it is done."""

        def start() -> tuple[Callable[[], bool], Callable[[], object]]:
            handle = self._state.save(folder, "background", wait=False)
            return handle.done, handle.wait

        self._save_and_train(start)

    def torch_async(self, folder: Path) -> None:
        """The same with torch's distributed checkpoint."""

        def start() -> tuple[Callable[[], bool], Callable[[], object]]:
            states = {"model": self._trainer.model.state_dict(), "optimizer": self._trainer.optimizer.state_dict()}
            future = distributed_checkpoint.async_save(states, checkpoint_id=str(folder / "torch_async"))
            return future.done, future.result

        self._save_and_train(start)

    def _save_and_train(self, start: Callable[[], tuple[Callable[[], bool], Callable[[], object]]]) -> None:
        started = time.perf_counter()
        done, wait = start()
        call_s = time.perf_counter() - started
        steps_s: list[float] = []
        while not done() and len(steps_s) < SAVE_STEPS_MAX:
            steps_s.append(self.step()["seconds"])
        wait()
        self.saved = {
            "call_s": call_s,
            "steps_s": steps_s,
            "state_bytes": (BYTES["weights"] + BYTES["state"])
            * sum(param.numel() for param in self._trainer.model.parameters()),
        }
