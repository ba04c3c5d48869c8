"""The memory of a process stays within what was promised, while a model is built, loaded, trained and saved.

69 M parameters, a budget of an eighth of weights, gradients and optimizer state (14 bytes per parameter in bf16, the
stricter way to count). The promise: the peak of RssAnon + RssShmem is at most that of plain PyTorch's forward and
backward, less its weights, plus the budget, plus 64 MB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conftest import Outcome

Run = Callable[..., Outcome]
SLACK_MIB = 64e6 / 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For what plain PyTorch and ours save."""
    (tmp_path / "saved").mkdir()
    yield tmp_path / "saved"
    shutil.rmtree(tmp_path / "saved")


def said_by(run: Run, *jobs: str) -> list[dict[str, Any]]:
    words = " then ".join(jobs).split()
    lines = run("memory_program", *words, limit_s=280.0, HF_HUB_OFFLINE="1").stdout.splitlines()
    facts = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(facts) == len(jobs) and facts[0]["parameters"] >= 69_000_000
    return facts


def check(reference: dict[str, Any], facts: dict[str, Any], phases: set[str]) -> None:
    peaks = facts["peaks"]
    assert phases <= set(peaks)
    promised = reference["peaks"]["step"] - reference["weights"] + facts["budget"] + SLACK_MIB
    assert max(peaks.values()) <= promised, (peaks, promised)
    # Without activations it is the budget alone that comes on top of what Python, torch and transformers take.
    for phase in phases - {"train"}:
        assert peaks[phase] <= peaks["imports"] + facts["budget"] + SLACK_MIB, (phase, peaks)
    assert facts["stats"]["host_peak_bytes"] <= facts["stats"]["host_budget_bytes"]
    assert facts["stats"]["disk_bytes_written"] > 0
    assert all(0 < loss < 20 for loss in facts["losses"])


def test_built_trained_saved_and_loaded_in_bf16(run_program: Run, folder: Path) -> None:
    """Loaded from what was saved, and from an fp32 checkpoint: transformers reads with several threads, and what they
    have read must not pile up over the budget."""
    paged = "paged precision=bf16 share=8 checkpoint"
    reference, facts, *loaded = said_by(
        run_program,
        f"plain precision=bf16 checkpoint={folder / 'fp32'}",
        f"{paged}={folder / 'ours'}",
        f"{paged}={folder / 'ours'} steps=1",
        f"{paged}={folder / 'fp32'} steps=1",
    )
    check(reference, facts, {"build", "train", "save"})
    for again in loaded:
        check(reference, again, {"load", "train"})
    for one in (facts, loaded[1]):
        assert abs(one["losses"][0] - reference["losses"][0]) < 0.05


@pytest.mark.slow
def test_built_and_trained_in_fp32(run_program: Run, folder: Path) -> None:
    reference, facts = said_by(
        run_program, "plain precision=fp32", f"paged precision=fp32 share=8 checkpoint={folder / 'ours'} steps=1"
    )
    check(reference, facts, {"build", "train", "save"})
    assert abs(facts["losses"][0] - reference["losses"][0]) < 1e-6
