"""Pipelines of torch whose stages are paged, each by its process alone: the bits of the same pipeline in memory."""

from __future__ import annotations

import re
from pathlib import Path

from tests.ranks import pipelines as programs
from tests.support.rank_processes import values_of

CELLS = [
    ("gpipe", "tight", "given"),
    ("1f1b", "tight", "given"),
    ("1f1b", "evicting", "looked at"),
    ("interleaved", "tight", "given"),
    ("zero bubble", "tight", "given"),
]


def test_stages_have_the_bits_of_the_pipeline_in_memory(tmp_path: Path) -> None:
    """Losses, gradients and weights, of torch's AdamW. Faults end when the order is known. That of torch's first step
    is another one: it runs each stage once more."""
    found = values_of(programs.train_stages, 2, str(tmp_path / "store"), str(tmp_path), CELLS)
    for of_rank in found:
        for (schedule, _, how), shown in zip(CELLS, of_rank, strict=True):
            assert shown["evictions"] > 0, "nothing was evicted: this tested nothing"
            if how == "given":
                assert shown["faults"][2] <= 1 and shown["faults"][3:] == [0, 0], (schedule, shown)


def test_replicas_of_stages_share_them(tmp_path: Path) -> None:
    """A mesh of pipeline x data-parallel, as the docs say: its second dimension is given to the context."""
    for found in values_of(programs.train_replicas, 4, str(tmp_path / "store"), str(tmp_path)):
        assert found["evictions"] > 0, "nothing was evicted: this tested nothing"


def test_a_reduction_that_is_forgotten_is_an_error(tmp_path: Path) -> None:
    one, other = values_of(programs.forget_a_reduction, 2, str(tmp_path / "store"), str(tmp_path))
    assert one == other
    wrapped = one.pop("DistributedDataParallel")
    assert re.search(r'UnsupportedError: DistributedDataParallel around a paged model.*ranks="local"', wrapped), wrapped
    assert "is paged and cannot be sharded" in one.pop("fully_shard")
    contradicting = re.compile(r'ConfigError: ranks="local" and (mesh|group)= contradict each other.*mesh\["dp"\]')
    assert all(contradicting.search(said) for said in one.values()), one
