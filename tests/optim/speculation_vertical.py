"""A disk that fails or is full under guesses in vertical order: ``python -m tests.optim.speculation_vertical DIRECTORY
[--chunks N] [--seed N]``.

Each run makes the same six steps of three micro-batches, of which one step clips, so that its guess is wrong. In each
run another transfer fails, in turns with EIO and ENOSPC. What fails is called again. Losses of the whole steps, weights
and state have to be those of the run in which nothing fails.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest

import deepoffload
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from tests.optim.speculation_campaign import said_on_the_command_line
from tests.optim.test_deferred import chunks_of
from tests.optim.test_speculation_faults import CLIPPING, NOT_CLIPPING, again, build, result
from tests.support.loops import assert_same_bits
from tests.support.models import rows
from tests.support.paging import Paging

MICRO_BATCHES = 3
LIMITS = (NOT_CLIPPING,) * 4 + (CLIPPING, NOT_CLIPPING)
QUIET_STEPS = 3
"""Transfers before the end of these steps do not fail."""


def loss_of(model: Any, batch: Any) -> Any:
    return model(batch).float().square().mean()


def run(paging: Paging) -> tuple[Any, range, dict[str, float]]:
    """What training leaves, the transfers of the steps that may fail, and the counts."""
    model, optimizer = build(paging)
    losses, before = [], 0
    for step, limit in enumerate(LIMITS):
        if step == QUIET_STEPS:
            before = chunks_of(model)
        batches = [rows(seed=10 * step + micro).to(model[0].weight.dtype) for micro in range(MICRO_BATCHES)]
        made: list[Any] = []

        def accumulate(batches: list[Any] = batches, made: list[Any] = made) -> None:
            made[:] = deepoffload.accumulate(model, batches, loss_of, order="vertical")

        optimizer.max_grad_norm = NOT_CLIPPING
        again(accumulate, optimizer.zero_grad)
        losses += made
        optimizer.max_grad_norm = limit
        again(optimizer.step)
        again(optimizer.zero_grad)
    chunks, stats = range(before + 1, chunks_of(model)), dict(deepoffload.stats(model))
    return [losses, result(model, optimizer)], chunks, stats


def main() -> None:
    with said_on_the_command_line(__doc__, "chunks", 200) as said:
        expected, chunks, stats = run(said.paging)
        assert stats["speculated"] > 0, "nothing was guessed"
        assert stats["rolled_back"] > 0, "no guess was wrong"
        every = max(1, len(chunks) // said.count)
        failed = changed = 0
        for number, chunk in enumerate(chunks[said.seed % every :: every]):
            script = f"nth={chunk} errno={(errno.EIO, errno.ENOSPC)[number % 2]}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=script))
                got, _, other = run(said.paging)
            assert_same_bits(expected, got, f"chunk {chunk} ")
            assert other["nvme_bytes"] <= stats["nvme_bytes"], f"chunk {chunk}: an extent is kept for good"
            failed += 1
            changed += any(other[name] != stats[name] for name in ("speculated", "rolled_back"))
        assert changed, "no failure has changed what is guessed: this tested nothing"
    print(f"{failed} of {len(chunks)} transfers failed, the same bits; {changed} runs made other guesses")


if __name__ == "__main__":
    main()
