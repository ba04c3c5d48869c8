"""Training with updates on a guess, of which a tenth is wrong, next to training without: the same losses, and nothing
grows. ``python -m tests.optim.speculation_campaign DIRECTORY --steps 1000`` is the long version of a test of the suite.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import deepoffload
from tests.optim.deferred import sorted_state
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.models import mlp, rows
from tests.support.paging import TIGHT, Paging

CLIPPING, NOT_CLIPPING = 1e-6, 1e6
SAMPLES = 6


@dataclass(frozen=True)
class Sizes:
    """What there is when no guess stands. ``process_bytes``: of the process's memory."""

    nvme_bytes: float
    blocks: int
    process_bytes: int


@dataclass(frozen=True)
class Ended:
    """``sizes``: at as many moments, the same number of steps apart."""

    clipped: int
    sizes: list[Sizes]
    stats: dict[str, float]


class Twin:
    """A model that trains with one value of ``step_overlap``."""

    def __init__(self, paging: Paging, step_overlap: str) -> None:
        setting = replace(TIGHT, step_overlap=step_overlap, precision="bf16")
        self.model = paging.build(partial(mlp, depth=6), setting, key="mlp")
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    def step(self, number: int, *, clips: bool) -> tuple[float, float | None]:
        """The loss, and the norm of the gradients."""
        self.optimizer.max_grad_norm = NOT_CLIPPING
        error = self.model(rows(seed=number).bfloat16()).float() - rows(seed=-1 - number)
        loss = error.square().mean()
        loss.backward()
        self.optimizer.max_grad_norm = CLIPPING if clips else NOT_CLIPPING
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), self.optimizer.grad_norm

    def sizes(self) -> Sizes:
        weights_of(self.model)
        give_back()
        blocks = list(pager_of(self.model).tiers.blocks())
        return Sizes(deepoffload.stats(self.model)["nvme_bytes"], len(blocks), resident_bytes())


def compare(paging: Paging, steps: int, *, seed: int = 0) -> Ended:
    """Train both. Raises AssertionError for the first bit that differs."""
    dice = random.Random(seed)
    guessing, serial = Twin(paging, "speculative"), Twin(paging, "none")
    clipped, sizes = 0, []
    for number in range(steps):
        clips = dice.random() < 0.1
        clipped += clips
        mine, expected = guessing.step(number, clips=clips), serial.step(number, clips=clips)
        assert mine == expected, f"step {number}: loss and norm are {mine}, not {expected}"
        if (number + 1) % (steps // SAMPLES) == 0:
            sizes.append(guessing.sizes())
    assert_same_bits(weights_of(serial.model), weights_of(guessing.model))
    assert_same_bits(sorted_state(serial.optimizer), sorted_state(guessing.optimizer))
    return Ended(clipped, sizes, deepoffload.stats(guessing.model))


class Said(NamedTuple):
    """What a campaign is told. ``count``: how much it does."""

    paging: Paging
    count: int
    seed: int


@contextmanager
def said_on_the_command_line(description: str | None, counted: str, default: int) -> Iterator[Said]:
    """``counted``: what the count counts, the name of its option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where swap files go: on a real disk")
    parser.add_argument(f"--{counted}", dest="count", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("deepoffload").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=said.directory) as directory:
        yield Said(Paging(Path(directory)), said.count, said.seed)


def main() -> None:
    with said_on_the_command_line(__doc__, "steps", 1000) as said:
        ended = compare(said.paging, said.count, seed=said.seed)
    print(f"{said.count} steps, the same bits; {ended.clipped} clipped; units", end=" ")
    print({name: ended.stats[name] for name in ("speculated", "rolled_back", "speculation_left")})
    for sizes in ended.sizes:
        print(sizes)


if __name__ == "__main__":
    main()
