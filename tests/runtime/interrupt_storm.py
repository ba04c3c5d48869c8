"""Ctrl-C again and again while a model trains, as the system sends it: ``python -m tests.runtime.interrupt_storm DIR
[--seconds S] [--step-overlap O] [--seed N]``.

The test suite interrupts at chosen places (``tests.runtime.lifecycle_program``); here nobody chooses. Each step that
was interrupted is made again, unless it counts already. Losses and weights have to be those of a run that nobody
disturbs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

import torch

from tests.runtime import lifecycle_program
from tests.runtime.lifecycle_program import Training, has_saved_tensor_hooks, weights
from tests.support.ctrl_c import CtrlC
from tests.support.inspect import tiers_of


def made_steps(training: Training) -> int:
    state = training.optimizer.state[next(iter(training.model.parameters()))]
    return int(state["step"]) if "step" in state else 0


def attempt(training: Training, ctrl_c: CtrlC) -> tuple[float | None, str]:
    """One step; its loss as far as it came, and what Ctrl-C ended."""
    loss, where = None, "forward"
    try:
        ctrl_c.go.set()
        graph = training.loss()
        loss, where = float(graph.detach()), "backward"
        graph.backward()
        where = "step"
        training.optimizer.step()
        where = "nothing"
    except KeyboardInterrupt:
        pass
    ctrl_c.call_off()
    return loss, where


def check(training: Training, where: str) -> None:
    """What holds between steps, after all that has happened."""
    assert torch._C._is_torch_function_enabled() and torch.is_grad_enabled(), f"a switch is off, after {where}"
    weights(training)
    leases = [block.name for block in tiers_of(training.engine).blocks() if block.leases]
    assert not leases and not has_saved_tensor_hooks(), f"{leases} are held, after {where}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-overlap", default="deferred", choices=("none", "deferred", "speculative"))
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    lifecycle_program.SWAP = said.directory
    torch.set_num_threads(1)
    undisturbed, training = (Training(step_overlap=said.step_overlap) for _ in range(2))
    begin = time.monotonic()
    losses = undisturbed.run(3)
    step_s = (time.monotonic() - begin) / 3
    dice, ended = random.Random(said.seed), Counter[str]()
    while time.monotonic() - begin < said.seconds:
        before = made_steps(training)
        loss, where = attempt(training, CtrlC(dice.random() * step_s * 1.1))
        ended[where] += 1
        if made_steps(training) > before:
            training.done += 1
            losses += undisturbed.run(max(0, training.done - undisturbed.done))
            assert loss == losses[training.done - 1], f"step {training.done}: {loss}, not {losses[training.done - 1]}"
        training.optimizer.zero_grad()
        check(training, where)
    training.run(max(0, undisturbed.done - training.done))
    pairs = zip(weights(training).values(), weights(undisturbed).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "the weights differ"
    print(f"{training.done} steps, the same bits; Ctrl-C ended {dict(ended)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
