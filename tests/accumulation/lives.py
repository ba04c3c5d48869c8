"""Steps that fail at random moments, and many steps: ``python -m tests.accumulation.lives SWAP_DIRECTORY [--steps N]
[--soak N] [--seed N]``.

Of ``--steps`` most are disturbed first: by exceptions in forwards, losses, hooks and backwards, and by Ctrl-C as the
system sends it, at any moment. Evaluations and another model come in between; orders and activations change. Losses and
weights have to be those of a run that nobody disturbs. Then ``--soak`` steps are made, in which memory may not grow.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent

import deepoffload
from tests.accumulation.loops import HORIZONTAL, VERTICAL
from tests.accumulation.trouble import Trouble
from tests.runtime.lifecycle_program import has_saved_tensor_hooks
from tests.support.ctrl_c import CtrlC
from tests.support.inspect import leases_of, pager_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import TIGHT, Paging

LIMIT_S = 120
"""A step that takes longer hangs: the process says where, and ends."""
MOMENTS = 15
GROWTH_BYTES_MAX = 4 << 20


def batches_of(step: int) -> list[Any]:
    return [batch(100 * step + micro, rows=1 + micro % 2) for micro in range(3)]


class Run:
    def __init__(self, paging: Paging) -> None:
        self.model = paging.build(TinyGPT, TIGHT)
        self.trouble = Trouble(self.model)
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)
        self.losses: list[Any] = []

    def accumulate(self, step: int, **how: Any) -> list[Any]:
        torch.manual_seed(step)
        return deepoffload.accumulate(self.model, batches_of(step), self.trouble.loss, **how)

    def step(self, step: int, **how: Any) -> None:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        self.losses += self.accumulate(step, **how)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def disturbed(self, step: int, chance: random.Random, step_s: float, **how: Any) -> str:
        """An attempt that mostly does not succeed. Returns what has ended it."""
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        ctrl_c = None
        if chance.random() < 0.5:
            self.trouble.left = chance.randrange(MOMENTS)
            self.trouble.raised = chance.choice([ArithmeticError, KeyboardInterrupt, SystemExit])
        else:
            ctrl_c = CtrlC(chance.random() * step_s)
        ended_by = "nothing"
        try:
            if ctrl_c is not None:
                ctrl_c.go.set()
            self.accumulate(step, **how)
            time.sleep(0)
        except (ArithmeticError, KeyboardInterrupt, SystemExit) as error:
            ended_by = type(error).__name__
        if ctrl_c is not None:
            ctrl_c.call_off()
        self.trouble.left = None
        self.optimizer.zero_grad()
        hooks = pager_of(self.model).hooks
        assert getcurrent().parent is None and not hooks.opened() and hooks.turns is None, ended_by
        assert not leases_of(self.model), ended_by
        assert not has_saved_tensor_hooks(), (ended_by, how)
        return ended_by


def lives(paging: Paging, steps: int, seed: int) -> None:
    undisturbed, run, other = Run(paging), Run(paging), Run(paging)
    chance, seen = random.Random(seed), Counter[str]()
    start = time.monotonic()
    for step in range(steps):
        undisturbed.step(step, order=HORIZONTAL, activations="keep")
    step_s = 1.5 * (time.monotonic() - start) / steps
    for step in range(steps):
        how = {
            "order": chance.choice([VERTICAL, VERTICAL, HORIZONTAL]),
            "activations": chance.choice(["keep", "recompute", "auto"]),
        }
        if chance.random() < 0.8:
            seen[run.disturbed(step, chance, step_s, **how)] += 1
        if chance.random() < 0.3:
            with torch.no_grad():
                next_token_loss(run.model, batch(step))
        if chance.random() < 0.2:
            other.step(step, order=VERTICAL)
        run.step(step, **how)
        if step % 50 == 49:
            print(f"{step + 1} steps, ended by {dict(seen)}", flush=True)
    assert_same_bits(undisturbed.losses, run.losses)
    assert_same_bits(weights_of(undisturbed.model), weights_of(run.model))
    print(f"{steps} steps: the losses and weights of a run that nobody disturbed")


def soak(paging: Paging, steps: int) -> None:
    run, settled = Run(paging), 0
    for step in range(steps):
        run.step(step % 50, order=VERTICAL, activations=("keep", "recompute", "auto")[step % 3])
        run.losses.clear()  # 2 kB in each step
        if step == steps // 3:
            give_back()
            settled = resident_bytes()
    give_back()
    grown = resident_bytes() - settled
    print(f"{steps} steps: grown by {grown / 1e6:.2f} MB since the first third, {threading.active_count()} threads")
    assert grown < GROWTH_BYTES_MAX


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--soak", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        paging = Paging(Path(folder))
        if asked.steps:
            lives(paging, asked.steps, asked.seed)
        if asked.soak:
            soak(paging, asked.soak)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
