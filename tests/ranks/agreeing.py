"""What ranks do in the tests of what they agree on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepoffload.config import parse_config
from deepoffload.config.resolve import Budgets
from deepoffload.errors import BudgetError, ConfigError, DeepOffloadError, UsageError
from deepoffload.io.probe import Bandwidth
from deepoffload.ranks.group import open_group
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.host_share import agree_on_budgets, host_ranks, least_rates, measure_together
from deepoffload.runtime.rank_facts import compare_models, compare_settings
from deepoffload.schedule.cost_model import Bandwidths
from tests.support.rank_processes import LONG_S


def an_agreement() -> tuple[Agreement, int]:
    group = open_group(torch.device("cpu"), timeout_s=LONG_S)
    assert group is not None
    return Agreement(group), group.ranks.rank


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def compare() -> list[str]:
    """Facts that are equal, and then facts of which rank 1 has others. After an error nothing is asked any more."""
    said = []
    same = {"a": "1", "b": "2"}
    for rank_1 in (same, {"a": "1", "b": "3"}, {"a": "1"}, {**same, "c": ""}, {"b": "2", "a": "1"}):
        agreement, rank = an_agreement()
        mine = rank_1 if rank == 1 else same
        said.append(error_of(agreement.compare, mine, "the model", "Do so", error=UsageError))
        if said[-1] != "nothing":
            assert error_of(agreement.gather, None, "something else") == said[-1]
    return said


def fail_in_the_middle() -> list[str]:
    """Rank 1 fails: outside of what is asked, before the others ask, and with an error that is not ours."""
    said = []

    def body(agreement: Agreement, rank: int, error: Exception) -> None:
        with agreement.together("opening"):
            agreement.gather(rank, "first")
            with agreement.together("measuring"):
                if rank == 1:
                    raise error
                agreement.gather(rank, "second")
            agreement.gather(rank, "third")

    for error in (ConfigError("no such path"), BudgetError("too little", 7), OSError(5, "broken")):
        agreement, rank = an_agreement()
        try:
            body(agreement, rank, error)
        except Exception as raised:
            said.append(f"{type(raised).__name__}: {raised}")
    return said


def die_in_the_middle() -> str:
    agreement, rank = an_agreement()
    if rank == 1:
        os._exit(3)
    return error_of(agreement.gather, None, "comparing budgets")


def compare_configurations(first: dict[str, Any], second: dict[str, Any]) -> str:
    agreement, rank = an_agreement()
    return error_of(compare_settings, agreement, parse_config(second if rank else first, world_size=2))


def compare_structures() -> list[str]:
    said = []

    def build(rank: int, change: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 if change == "shape" and rank else 2))
        if rank and change == "more":
            model.append(nn.Linear(2, 2))
        if rank and change == "frozen":
            model[0].bias.requires_grad_(False)
        dtype = torch.int64 if rank and change == "type" else torch.int32
        seen = torch.full((2 if rank and change == "buffer" else 1,), rank, dtype=dtype)
        model[0].register_buffer("seen", seen)  # values may differ
        if rank or change != "more buffers":
            model[1].register_buffer("mask", torch.zeros(3), persistent=False)
        return model.bfloat16() if rank and change == "dtype" else model

    for change in ("", "shape", "more", "frozen", "dtype", "buffer", "type", "more buffers"):
        agreement, rank = an_agreement()
        model = build(rank, change)
        said.append(error_of(compare_models, agreement, [model]))
    return said


def share_a_host(paths: list[str]) -> tuple[int, Budgets, list[float], int, float, Bandwidths]:
    """Each rank has other budgets, and says when it has measured."""
    agreement, rank = an_agreement()
    budgets = agree_on_budgets(agreement, Budgets(0, 100 - rank, 50 + rank, ("as said",)))
    measured_at = []

    def measure() -> list[Bandwidth]:
        measured_at.append(time.monotonic())
        time.sleep(0.05)
        measured_at.append(time.monotonic())
        return [Bandwidth("/a", "pool", True, 1.0 + rank, 2.0, 3.0, 0.0)]

    rates, sharers = measure_together(agreement, [paths[rank]], measure)
    least = least_rates(agreement, Bandwidths(1.0 + rank, 5.0 - rank, 3.0, 4.0))
    return host_ranks(agreement), budgets, measured_at, sharers, rates[0].read_bytes_per_s, least
