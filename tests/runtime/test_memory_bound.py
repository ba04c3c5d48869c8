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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What plain PyTorch and ours have saved, for the tests that load it."""
    directory = tmp_path_factory.mktemp("checkpoints")
    yield directory
    shutil.rmtree(directory)


def program(run: Run, *arguments: str) -> dict[str, Any]:
    return run("memory_program", *arguments, limit_s=280.0, fresh=True, HF_HUB_OFFLINE="1").said


def plain(run: Run, precision: str, checkpoints: Path) -> dict[str, Any]:
    """Plain PyTorch, run once per precision; leaves an fp32 checkpoint behind."""
    kept = checkpoints / f"plain-{precision}.json"
    if not kept.exists():
        checkpoint = f"checkpoint={checkpoints / 'plain-fp32'}"
        kept.write_text(json.dumps(program(run, "plain", f"precision={precision}", checkpoint)))
    facts: dict[str, Any] = json.loads(kept.read_text())
    assert facts["parameters"] >= 69_000_000
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


def test_built_trained_and_saved_in_bf16(run_program: Run, checkpoints: Path) -> None:
    reference = plain(run_program, "bf16", checkpoints)
    saved = checkpoints / "ours-bf16"
    facts = program(run_program, "paged", "precision=bf16", "share=8", f"checkpoint={saved}")
    check(reference, facts, {"build", "train", "save"})
    assert abs(facts["losses"][0] - reference["losses"][0]) < 0.05
    again = program(run_program, "paged", "precision=bf16", "share=8", f"checkpoint={saved}", "steps=1")
    check(reference, again, {"load", "train"})


def test_loaded_from_an_fp32_checkpoint(run_program: Run, checkpoints: Path) -> None:
    """transformers reads with several threads: what they have read must not pile up beside the budget."""
    reference = plain(run_program, "bf16", checkpoints)
    saved = checkpoints / "plain-fp32"
    facts = program(run_program, "paged", "precision=bf16", "share=8", f"checkpoint={saved}", "steps=1")
    check(reference, facts, {"load", "train"})
    assert abs(facts["losses"][0] - reference["losses"][0]) < 0.05


@pytest.mark.slow
def test_built_and_trained_in_fp32(run_program: Run, checkpoints: Path) -> None:
    reference = plain(run_program, "fp32", checkpoints)
    facts = program(
        run_program, "paged", "precision=fp32", "share=8", f"checkpoint={checkpoints / 'ours-fp32'}", "steps=1"
    )
    check(reference, facts, {"build", "train", "save"})
    assert abs(facts["losses"][0] - reference["losses"][0]) < 1e-6
