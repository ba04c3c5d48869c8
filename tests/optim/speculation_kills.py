"""SIGKILL at places of an update on a guess: ``python -m tests.optim.speculation_kills SWAP CHECKPOINTS [--vertical]``.

Each child loads the checkpoint of step 3 and trains on. It guesses from its first step on, clips in some, saves after
each while the next one guesses, and kills itself at one place. Afterwards nothing of it is left in the swap folder,
every checkpoint is whole, and training goes on from the newest as if nothing had happened. With ``--vertical`` each
step has three micro-batches in vertical order, and a child dies after each of the first eight calls of every place.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepoffload
from deepoffload.checkpoint.source import open_checkpoint
from deepoffload.memory.kept_bytes import KeptBytes
from deepoffload.optim.speculation.guess import Guess
from tests.checkpoint.training import snapshot
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows

BEFORE, STEPS, CLIPS = 3, 9, (4, 5)

PLACES: tuple[tuple[type, str, int], ...] = (
    (KeptBytes, "will_change", 3),
    (KeptBytes, "_journal", 2),
    (Guess, "make", 2),
    (Guess, "confirm", 2),
    (KeptBytes, "_back_to_extent", 1),
    (Guess, "apply", 2),
)
"""The call of a method after which a child dies."""
EACH_CALL = tuple((owner, name, call) for owner, name, _ in PLACES for call in range(1, 9))
MICRO_BATCHES = 3
NOT_REACHED = 3
"""How a child ends that has trained to its end."""


def loss_of(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


class Run:
    def __init__(self, swap: str, checkpoints: Path, *, vertical: bool) -> None:
        torch.manual_seed(0)
        with deepoffload.offload_context(
            host_budget="256KiB",
            offload_param="cpu",  # so that weights go into journals
            nvme_path=swap,
            step_overlap="speculative",
            prefetch=False,
            aio={"backend": "pool"},
        ) as context:
            self.model = mlp(depth=4)
        assert context.engine is not None
        self.engine = context.engine
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2, max_grad_norm=1e6)
        self.state = deepoffload.TrainingState(self.model, self.optimizer)
        self.checkpoints = checkpoints
        self.vertical = vertical

    def backward(self, step: int) -> None:
        if self.vertical:
            batches = [rows(seed=100 * step + micro) for micro in range(MICRO_BATCHES)]
            deepoffload.accumulate(self.model, batches, loss_of, order="vertical")
            return
        deepoffload.last_micro_batch(self.model)
        loss_of(self.model, rows(seed=step)).backward()

    def train(self, first: int, *, saves: bool = False) -> None:
        for step in range(first, STEPS):
            self.backward(step)
            self.optimizer.max_grad_norm = 1e-3 if step in CLIPS else 1e6
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == BEFORE - 1 or saves:
                self.state.save(self.checkpoints, f"step{step + 1}", wait=not saves)

    def end(self) -> Any:
        seen = snapshot(self.model, self.optimizer)
        stats = self.engine.stats()
        assert stats["speculated"] > 0 and stats["rolled_back"] > 0, stats
        self.engine.close()
        return seen


def die_after(owner: type, name: str, calls: int) -> None:
    real: Callable[..., Any] = getattr(owner, name)
    left = [calls]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


def child(swap: str, checkpoints: Path, place: tuple[type, str, int], *, vertical: bool) -> None:
    try:
        run = Run(swap, checkpoints, vertical=vertical)
        run.state.load(checkpoints, f"step{BEFORE}")
        die_after(*place)
        run.train(BEFORE, saves=True)
        os._exit(NOT_REACHED)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    torch.set_num_threads(1)
    swap, checkpoints = sys.argv[1], Path(sys.argv[2])
    vertical = sys.argv[3:] == ["--vertical"]
    first = Run(swap, checkpoints, vertical=vertical)
    first.train(0)
    expected, found, killed = first.end(), set[int](), list[tuple[type, str]]()
    for place in EACH_CALL if vertical else PLACES:
        number = os.fork()
        if not number:
            child(swap, checkpoints, place, vertical=vertical)
        _, status = os.waitpid(number, 0)
        reached = not (vertical and os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_REACHED)
        assert not reached or os.WIFSIGNALED(status), f"the child that should die after {place} ended with {status}"
        killed += [place[:2]] * reached
        left = os.listdir(swap)
        assert not left, f"killed after {place}, it left {left}"
        folders = [path for path in checkpoints.iterdir() if path.is_dir() and not path.name.startswith(".")]
        for folder in folders:
            with open_checkpoint(str(folder), lambda nbytes: None) as source:
                for file in source.manifest.files:
                    source.reader.verify(file)
        newest = int((checkpoints / "latest").read_text().removeprefix("step"))
        found.add(newest)
        run = Run(swap, checkpoints, vertical=vertical)
        run.state.load(checkpoints)
        run.train(newest)
        assert_same_bits(expected, snapshot(run.model, run.optimizer))
        run.engine.close()
        for folder in folders:
            if folder.name != f"step{BEFORE}":
                shutil.rmtree(folder)
        (checkpoints / "latest").write_text(f"step{BEFORE}")
    assert len(found) > 1, "no child has saved"
    missed = {place[:2] for place in PLACES} - set(killed)
    assert not missed, f"no child came to {missed}"
    print(len(killed), "killed")


if __name__ == "__main__":
    main()
