"""Native passes of the optimizers run on torch's number of threads, within what the process may use."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.optim.threads import num_threads
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import TIGHT, Paging, plain
from tests.support.programs import Programs


def test_torchs_number_of_threads_counts(two_threads: None) -> None:
    assert num_threads() == min(2, len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)
    assert num_threads() == 1


def test_updates_on_two_threads_have_the_bits_of_ordinary_parameters(two_threads: None, paging: Paging) -> None:
    def trained(model: nn.Module) -> dict[str, Tensor]:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            model(rows(width=256, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    build = partial(mlp, width=256, depth=4)
    assert_same_bits(trained(plain(build)), trained(paging.build(build, TIGHT, key="two threads")))


def test_no_more_threads_than_cores_that_may_be_used(programs: Programs) -> None:
    code = """
import os, torch
torch.set_num_threads(4)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from deepoffload.optim.threads import num_threads
print(torch.get_num_threads(), num_threads())
"""
    done = programs.run(code)
    assert done.stdout.split() == ["4", "1"], done.stderr
