"""Saving and loading pass over everything once: blocks are read ahead, and nothing is read only to be overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from tests.checkpoint.training import snapshot
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits

LAYERS, WIDTH = 40, 256
WEIGHT_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 2
STATE_BYTES = 5 * WEIGHT_BYTES
BUDGET_BYTES = 4 << 20


class Run:
    """Layers of which nearly everything is on NVMe."""

    def __init__(self, nvme_path: Path, *, prefetch: bool = True) -> None:
        torch.manual_seed(0)
        settings = {"host_budget": BUDGET_BYTES, "nvme_path": str(nvme_path), "prefetch": prefetch}
        with deepoffload.offload_context(settings, precision="bf16") as context:
            self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.engine = context.engine
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2)
        self.state = deepoffload.TrainingState(self.model, self.optimizer)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self) -> dict[str, float]:
        return dict(self.engine.stats())


@pytest.fixture
def run(nvme_path: Path) -> Iterator[Run]:
    made = Run(nvme_path)
    yield made
    made.engine.close()


def test_a_save_reads_each_block_once_and_moves_none(run: Run, tmp_path: Path) -> None:
    """From its extent, or not at all where it is in memory."""
    pager_of(run.engine).catch_up_all()
    before = run.counted()
    run.state.save(tmp_path)
    after = run.counted()
    read_bytes = after["disk_bytes_read"] - before["disk_bytes_read"]
    assert STATE_BYTES - BUDGET_BYTES < read_bytes <= 1.2 * (STATE_BYTES + WEIGHT_BYTES), "each block at most once"
    for counter in ("faults", "prefetches", "evictions", "disk_bytes_written", "host_bytes"):
        assert after[counter] == before[counter], counter


def test_a_load_reads_nothing_that_it_overwrites(run: Run, tmp_path: Path) -> None:
    expected = snapshot(run.model, run.optimizer)
    run.state.save(tmp_path)
    run.step()
    pager_of(run.engine).catch_up_all()
    before = run.counted()
    run.state.load(tmp_path)
    after = run.counted()
    assert after["disk_bytes_read"] - before["disk_bytes_read"] < WEIGHT_BYTES / 4
    assert after["disk_bytes_written"] - before["disk_bytes_written"] <= STATE_BYTES + WEIGHT_BYTES + BUDGET_BYTES
    assert_same_bits(expected, snapshot(run.model, run.optimizer))


def test_the_serial_reference_reads_nothing_ahead(nvme_path: Path, tmp_path: Path) -> None:
    run = Run(nvme_path, prefetch=False)
    before = run.counted()
    run.state.save(tmp_path)
    assert run.counted()["prefetches"] == before["prefetches"]
    expected = snapshot(run.model, run.optimizer)
    run.step()
    run.state.load(tmp_path)
    assert_same_bits(expected, snapshot(run.model, run.optimizer))
    run.engine.close()


def test_weights_that_the_program_holds_are_loaded_in_place(run: Run, tmp_path: Path) -> None:
    held = [layer.weight.detach() for layer in run.model[::8]]
    run.state.save(tmp_path)
    expected = [value.clone() for value in held]
    run.step()
    run.state.load(tmp_path)
    assert_same_bits(expected, held)
