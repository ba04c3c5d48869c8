"""A disk that fails or is full, or a program that is interrupted, while units are updated on a guess or that is undone:
the confirmed bytes are whole, the step can be repeated, and nothing is lost or kept for good."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure, PlacementError
from deepoffload.io.engine import IoEngine
from deepoffload.memory.kept_bytes import KeptBytes
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.runtime import disk as disk_module
from tests.optim.deferred import backward, sorted_state, units_guessed
from tests.optim.test_deferred import chunks_of
from tests.support.inspect import tiers_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, Paging
from tests.support.programs import ROOT, Programs

SETTING = replace(EVICTING, step_overlap="speculative", precision="bf16")
CLIPPING, NOT_CLIPPING = 1e-3, 1e6


def build(paging: Paging, **config: Any) -> tuple[nn.Module, Any]:
    model = paging.build(partial(mlp, depth=4), SETTING, key="deferred", **config)
    return model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=NOT_CLIPPING)


def again(call: Any, before: Any = lambda: None) -> None:
    try:
        call()
    except IoFailure:
        before()
        call()


def train(model: nn.Module, optimizer: Any, *limits: float, first: int = 0) -> Any:
    """Steps of which those with a low limit clip; the limit is known after backward only, so the guess was wrong. What
    fails is called again."""

    def backward(seed: int) -> None:
        model(rows(seed=seed).to(model[0].weight.dtype)).float().square().mean().backward()

    for seed, limit in enumerate(limits, start=first):
        optimizer.max_grad_norm = NOT_CLIPPING
        again(partial(backward, seed), optimizer.zero_grad)
        optimizer.max_grad_norm = limit
        again(optimizer.step)
        again(optimizer.zero_grad)


def result(model: nn.Module, optimizer: Any) -> Any:
    seen: list[Any] = []
    again(lambda: seen.append(weights_of(model)))
    again(lambda: seen.append(sorted_state(optimizer)))
    return seen


def test_a_transfer_fails(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Any, range, dict[str, float]]:
        model, optimizer = build(paging)
        train(model, optimizer, *[NOT_CLIPPING] * 3)
        before = chunks_of(model)
        train(model, optimizer, NOT_CLIPPING, CLIPPING, NOT_CLIPPING, first=3)
        chunks = range(before + 1, chunks_of(model))
        extents = deepoffload.stats(model)["nvme_bytes"]
        return result(model, optimizer), chunks, {**deepoffload.stats(model), "extents": extents}

    expected, chunks, stats = run()
    assert stats["speculated"] > 0 and stats["rolled_back"] > 0
    failed = 0
    for number, chunk in enumerate(chunks[1 :: len(chunks) // 24]):
        code = (errno.EIO, errno.ENOSPC)[number % 2]
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={code}"))
            got, _, other = run()
        assert_same_bits(expected, got, f"chunk {chunk} ")
        assert other["nvme_bytes"] <= stats["nvme_bytes"], "an extent is kept for good"
        failed += other["speculated"] != stats["speculated"] or other["rolled_back"] != stats["rolled_back"]
    assert failed, "no guess has met a failure: this tested nothing"


def test_without_disk_space_for_what_is_kept_units_are_deferred(paging: Paging) -> None:
    model, optimizer = build(paging)
    train(model, optimizer, *[NOT_CLIPPING] * 3)
    expected = [weights_of(model), sorted_state(optimizer)]
    del model, optimizer
    with pytest.raises(PlacementError) as refused:
        build(paging, nvme_budget=304 << 10)
    small, optimizer = build(paging, nvme_budget=refused.value.enough_nvme_bytes)
    train(small, optimizer, *[NOT_CLIPPING] * 3)
    assert_same_bits(expected, [weights_of(small), sorted_state(optimizer)])
    train(small, optimizer, NOT_CLIPPING, CLIPPING, first=3)
    assert deepoffload.stats(small)["speculation_left"] > 0


def test_guesses_leave_disk_space_for_blocks_that_come_later(paging: Paging) -> None:
    """Nobody knew of what is unfrozen when the model was placed: guesses give way to it."""

    def half_frozen() -> nn.Module:
        model = mlp(depth=4)
        for layer in model[:3]:
            layer.requires_grad_(False)
        return model

    def spare_bytes(nvme_budget: int) -> list[float]:
        model = paging.build(half_frozen, SETTING, key="half frozen", nvme_budget=nvme_budget)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        tiers, left = tiers_of(model), []
        for seed in range(6):
            backward(model, seed)
            if seed == 3:
                assert units_guessed(model) > 0
                model.requires_grad_(True)
                model(rows(seed=seed).to(torch.bfloat16))
                assert units_guessed(model) == 0
            left.append(tiers.transfers.spare_disk_bytes())
            optimizer.step()
            optimizer.zero_grad()
        return left

    ample_bytes = 4 << 20
    needed_bytes = ample_bytes - int(spare_bytes(ample_bytes)[3])
    assert min(spare_bytes(needed_bytes + (40 << 10))) >= 0


@pytest.mark.parametrize("place", ["while it is made", "while it is undone"])
def test_interrupted(paging: Paging, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Ctrl-C at a place where it arrives only by chance: a call that is there raises it."""
    model, optimizer = build(paging)
    train(model, optimizer, *[NOT_CLIPPING] * 4)
    expected = [weights_of(model), sorted_state(optimizer)]
    del model, optimizer
    model, optimizer = build(paging)
    train(model, optimizer, *[NOT_CLIPPING] * 3)
    name = "will_change" if place == "while it is made" else "_back_to_extent"
    calls: list[int] = []
    real = getattr(KeptBytes, name)

    def interrupt(self: Any, *args: Any) -> Any:
        made = real(self, *args)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patch:
        patch.setattr(KeptBytes, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(rows(seed=3).to(model[0].weight.dtype)).float().square().mean().backward()
            optimizer.zero_grad()
    optimizer.zero_grad()
    assert units_guessed(model) == 0
    train(model, optimizer, NOT_CLIPPING, first=3)
    assert_same_bits(expected, [weights_of(model), sorted_state(optimizer)])


def test_blocks_slide_to_make_room_for_what_is_kept(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the update is about to use: it takes their addresses afterwards. Here they slide each time."""

    def run(step_overlap: str) -> Any:
        setting = replace(SETTING, room=4.0, step_overlap=step_overlap, precision="keep", evict_always=False)
        model = paging.build(partial(mlp, depth=4), setting, key="deferred")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=NOT_CLIPPING)
        train(model, optimizer, *[NOT_CLIPPING] * 5, CLIPPING, NOT_CLIPPING)
        return result(model, optimizer)

    expected = run("none")
    slid: list[str] = []
    real = KeptBytes.will_write

    def will_write(self: Any, ranges: Any) -> None:
        real(self, ranges)
        tiers = self._tiers
        before = {block: block.offset for block in tiers.resident() if block.leases}
        for granule_bytes in range(tiers.arena.free_bytes, 0, -PAGE_BYTES):
            tiers.merge_holes(granule_bytes)
        slid.extend(block.name for block, offset in before.items() if block.offset != offset)

    with monkeypatch.context() as patch:
        patch.setattr(KeptBytes, "will_write", will_write)
        got = run("speculative")
    assert slid, "nothing has slid: this tested nothing"
    assert_same_bits(expected, got)


def test_killed(programs: Programs, nvme_path: Path, tmp_path: Path) -> None:
    done = programs.run(ROOT / "tests" / "optim" / "speculation_kills.py", str(nvme_path), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == ["6", "killed"]
