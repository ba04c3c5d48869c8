"""A rank that fails, dies or differs is an error on all ranks, which names it. None hangs, nothing is left on disk."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepoffload import CPUAdamW, offload_context
from tests.ranks.training_programs import MODELS, loss_of
from tests.support.rank_processes import LONG_S, SOON_S, Ended, run_ranks

IN_MEMORY: dict[str, Any] = {"host_budget": "64MiB", "ranks": {"timeout_s": LONG_S}}


class FailsInForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the third layer is out of order")


def train(failing_rank: int, how: str, config: dict[str, Any], seed_of_rank: bool = False) -> int:
    """Returns the number of steps made."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5 + (rank if seed_of_rank else 0))
    with offload_context(config):
        model: Any = MODELS["gpt"]()
    optimizer = CPUAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for step in range(4):
        fails = rank == failing_rank and step == 2
        if fails and how == "before the forward":
            raise KeyError("the data loader has no such sample")
        if fails and how == "in the forward":
            model.blocks[2].mlp[1] = FailsInForward()
        loss = loss_of(model, "gpt", step)
        if fails and how == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if fails and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fails and how == "in the backward":
            loss.register_hook(lambda _: 1 / 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return 4


def train_as_main(*arguments: Any) -> int:
    """The same, with what Python notes of an error that ends the main program."""
    try:
        return train(*arguments)
    except Exception as error:
        sys.last_value = error
        raise


def others(ended: list[Ended], failing_rank: int) -> list[Ended]:
    return [one for rank, one in enumerate(ended) if rank != failing_rank]


SAID = {
    "before the forward": "no such sample",
    "in the forward": "out of order",
    "in the backward": "ZeroDivisionError",
}


@pytest.mark.parametrize(
    ("how", "world_size"),
    [*((how, 2 + turn % 2) for turn, how in enumerate([*SAID, "disk full", "killed"])), ("killed", 3)],
)
def test_all_ranks_hear_of_a_failure(how: str, world_size: int, tmp_path: Path) -> None:
    config = {**IN_MEMORY, "host_budget": "4MiB", "nvme_path": str(tmp_path), "nvme_budget": "64MiB"}
    ended = run_ranks(train_as_main, world_size, 1, how, config)
    for one in others(ended, 1):
        assert one.error == "RankError", one.text
        assert "rank 1" in one.text
        assert SAID.get(how, "") in one.text
        if how == "disk full":
            assert "EFBIG" in one.text and str(tmp_path) in one.text
        assert one.seconds < SOON_S
    assert not list(tmp_path.iterdir())


def test_ranks_with_different_weights_are_told_which() -> None:
    for one in run_ranks(train, 2, -1, "", IN_MEMORY, True):
        assert one.error in ("RankError", "UsageError"), one.text
        assert "position" in one.text
        assert "torch.manual_seed" in one.text


def test_budgets_that_differ() -> None:
    for one in run_ranks(with_config_of_rank, 2):
        assert one.error is not None, one.text
        assert "rank 1" in one.text
        assert "host_budget" in one.text


def with_config_of_rank() -> int:
    return train(-1, "", {**IN_MEMORY, "host_budget": "64MiB" if os.environ["RANK"] == "0" else "48MiB"})


def one_is_local() -> None:
    ranks: Any = "local" if os.environ["RANK"] == "1" else {"timeout_s": 3}
    with offload_context({"host_budget": "64MiB"}, ranks=ranks):
        nn.Linear(4, 4)


def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    waiting, alone = run_ranks(one_is_local, 2)
    assert alone.error is None, alone.text
    assert waiting.error == "RankError"
    assert "within 3 s (ranks.timeout_s)" in waiting.text
