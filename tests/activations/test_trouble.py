"""Activations without room, failing disks, Ctrl-C, exceptions: the step fails, nothing leaks, the next one works."""

from __future__ import annotations

import errno
import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepoffload
from deepoffload import offload_context, stats
from deepoffload.activations.copies import HostWay
from deepoffload.config import parse_config
from deepoffload.device import Tier
from deepoffload.errors import BudgetError, ClosedError, ConfigError, IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from deepoffload.runtime.context import engine_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import plain

PART = 16 << 10
"""Two inputs of blocks."""


def gpt() -> TinyGPT:
    return TinyGPT(checkpointing=False, dropout=0.0)


def build(path: Path, **config: Any) -> Any:
    said = {"offload_activations": "nvme", "activation_budget": PART, "host_budget": "8MiB", "nvme_path": str(path)}
    with offload_context(**said | {"debug": {"poison": True}} | config):
        torch.manual_seed(0)
        return gpt()


def step(model: Any, optimizer: Any, number: int) -> Tensor:
    loss = next_token_loss(model, batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def nothing_is_left(model: Any) -> None:
    torch.zeros((), requires_grad=True).clone().backward()  # torch keeps an interrupted backward until the next one
    gc.collect()
    found = stats(model)
    assert found["activation_bytes"] == found["activation_host_bytes"] == 0
    assert found["nvme_bytes"] == 0, "all else stays in memory"


def next_steps_are_right(model: Any, optimizer: Any) -> None:
    """As if nothing had happened: the model is as it was made."""
    optimizer.zero_grad()
    nothing_is_left(model)
    reference = plain(gpt)
    other = deepoffload.CPUAdamW(reference.parameters(), lr=1e-2)
    for number in range(3):
        assert_same_bits(step(reference, other, number), step(model, optimizer, number))
    assert_same_bits(weights_of(reference), weights_of(model))
    nothing_is_left(model)


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_budget_below_one_input(tmp_path: Path) -> None:
    model = build(tmp_path, activation_budget="4KiB")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    with pytest.raises(BudgetError, match=r"activation 1 \[2, 16, 48\] takes 6,144 bytes.* to at least 16384 bytes"):
        step(model, optimizer, 0)
    nothing_is_left(model)
    next_token_loss(model, batch(0, rows=1)).backward()
    assert stats(model)["activations_taken"] == 0, "less than a page stays"


def test_a_host_part_that_is_full(tmp_path: Path) -> None:
    model = build(tmp_path, offload_activations="host")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    said = r"the 2 before it take 16384B of activation_budget.*at least 24576 bytes.*offload_activations = \"nvme\""
    with pytest.raises(BudgetError, match=said.replace("16384B", ".*")):
        step(model, optimizer, 0)
    nothing_is_left(model)
    enough = build(tmp_path, offload_activations="host", activation_budget=2 * PART)
    next_steps_are_right(enough, deepoffload.CPUAdamW(enough.parameters(), lr=1e-2))


def test_a_disk_that_fills(tmp_path: Path) -> None:
    """The budget of NVMe holds one input; the step needs two there."""
    model = build(tmp_path, nvme_budget="8KiB")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    with pytest.raises(
        BudgetError, match=r"no room for activation \d.* no room on NVMe .*raise nvme_budget to at least"
    ):
        step(model, optimizer, 0)
    nothing_is_left(model)
    next_token_loss(model, batch(0, rows=1)).backward()
    optimizer.zero_grad()
    again = build(tmp_path, nvme_budget="32KiB")
    next_steps_are_right(again, deepoffload.CPUAdamW(again.parameters(), lr=1e-2))


@pytest.mark.parametrize(("operation", "code"), [("write", errno.EIO), ("write", errno.ENOSPC), ("read", errno.EIO)])
def test_a_disk_that_fails(tmp_path: Path, operation: str, code: int) -> None:
    """All writes fail, or one read. (One write alone may be of what nobody needs any more: its failure is nobody's.)"""
    for which in ("every=1",) if operation == "write" else ("nth=1", "nth=2"):
        with pytest.MonkeyPatch.context() as patch:
            script = f"op={operation} {which} errno={code}"
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=script))
            model = build(tmp_path)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        with pytest.raises(IoFailure, match="activation") as caught:
            for _ in range(2):  # a write that fails at the end is noticed later
                next_token_loss(model, batch(0)).backward()
        assert caught.value.errno == code and caught.value.offset >= 0 and str(tmp_path) in str(caught.value)
        del caught
        if operation == "write":  # this disk stays broken
            optimizer.zero_grad()
            nothing_is_left(model)
            model = build(tmp_path)
            optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        next_steps_are_right(model, optimizer)


# -- what ends a step in the middle ------------------------------------------------------------------------------------


class Stop(Exception):
    """An error of the program's."""


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise Stop


@pytest.mark.parametrize("stop", [interrupt, fail])
@pytest.mark.parametrize("when", ["forward", "recomputed", "backward"])
def test_a_step_that_is_ended(tmp_path: Path, stop: Callable[[], None], when: str) -> None:
    model = build(tmp_path)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    calls = {"forward": 0, "backward": 0}

    def count(kind: str) -> None:
        calls[kind] += 1
        wanted = {"forward": ("forward", 3), "recomputed": ("forward", 6), "backward": ("backward", 2)}[when]
        if (kind, calls[kind]) == wanted:
            stop()

    hooks = [block.mlp.register_forward_pre_hook(lambda *_: count("forward")) for block in model.blocks]
    hooks += [block.norm.register_full_backward_hook(lambda *_: count("backward")) for block in ()]
    hooks += [block.ln2.weight.register_hook(lambda _: count("backward")) for block in model.blocks]
    with pytest.raises((KeyboardInterrupt, Stop)):
        step(model, optimizer, 5)
    assert stats(model)["activations_taken"] >= 2
    for hook in hooks:
        hook.remove()
    next_steps_are_right(model, optimizer)


def test_a_graph_that_outlives_its_engine(tmp_path: Path) -> None:
    model = build(tmp_path)
    loss = next_token_loss(model, batch(0))
    engine_of(model).close()
    with pytest.raises(ClosedError):
        loss.backward()


# -- configuration -----------------------------------------------------------------------------------------------------


def lines(model: Any) -> Iterator[str]:
    yield from engine_of(model).placement.table().splitlines()


def test_what_the_table_says(tmp_path: Path) -> None:
    found = next(line for line in lines(build(tmp_path)) if line.startswith("activations: "))
    assert found == (
        "activations: inputs of checkpointed blocks in at most 16.00 KiB of host memory, and beyond that on NVMe"
    )
    model = build(tmp_path, offload_activations="host", activation_budget=None)
    found = next(line for line in lines(model) if line.startswith("activations: "))
    assert "stay where they are made: a CPU device computes in host memory" in found
    assert "activations_taken" not in stats(model)
    assert not any(
        line.startswith("activations")
        for line in lines(build(tmp_path, offload_activations=None, activation_budget=None))
    )


def test_what_a_budget_leaves(tmp_path: Path) -> None:
    """A refusal names a budget in which activations have theirs."""
    for said in ({"activation_budget": "1MiB"}, {"activation_budget": None}):
        with pytest.raises(BudgetError) as caught:
            build(tmp_path, host_budget="1100KiB" if said["activation_budget"] else "48KiB", **said)
        assert caught.value.enough_bytes is not None
        build(tmp_path, host_budget=caught.value.enough_bytes, **said)
    with pytest.raises(BudgetError, match="activation_budget gives 64 bytes, less than a page"):
        build(tmp_path, activation_budget=64)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"activation_budget": 1}, "activation_budget without offload_activations"),
        ({"offload_activations_above": 1}, "offload_activations_above without offload_activations"),
        ({"offload_activations": "nvme"}, "offload_activations is nvme, but there is no nvme_path"),
        ({"offload_activations": "nvme", "nvme_path": "/tmp", "nvme_budget": 0}, "nvme_budget = 0"),
        ({"offload_activations": "host", "inference": True}, "inference = true keeps nothing for backward"),
        ({"offload_activations": "disk"}, "offload_activations"),
        ({"offload_activations": "host", "activation_budget": 0}, "activation_budget"),
    ],
)
def test_bad_settings(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config(None, **said)
    with pytest.raises(BudgetError, match="lower activation_budget or raise host_budget"):
        offload_context(host_budget="1MiB", offload_activations="host", activation_budget="1MiB").__enter__()


def test_the_key_of_deepspeed() -> None:
    config = parse_config({"activation_checkpointing": {"cpu_checkpointing": True}})
    assert config.offload_activations is Tier.HOST and not config.notes and not config.warnings
    assert parse_config({"activation_checkpointing": {"cpu_checkpointing": False}}).offload_activations is None
    both = parse_config({"activation_checkpointing": {"cpu_checkpointing": True}}, offload_activations="none")
    assert not both.offloads_activations


def test_ctrl_c_while_an_activation_leaves_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the store lets go of its lock. (Before, nobody knew of what had just left, and it stayed.)"""
    model = build(tmp_path, activation_budget="1MiB")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    real = HostWay.take

    def take(*rest: Any) -> None:
        interrupt()
        real(*rest)

    with monkeypatch.context() as patch:
        patch.setattr(HostWay, "take", take)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, 0)
    next_steps_are_right(model, optimizer)
