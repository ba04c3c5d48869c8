"""Both directions with DeepSpeed itself. Runs where it is installed: minutes, as every rank starts a process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepoffload
from deepoffload.checkpoint.convert.commands import run as command
from tests.checkpoint.convert.test_from_deepspeed import LOSS_TOLERANCE, check, losses_of
from tests.support import deepspeed_peer
from tests.support.deepspeed_peer import STEPS, PeerModel, param_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

RANKS = (1, 2, 3)
STAGES = (1, 2, 3)


def peer(*arguments: object) -> dict[str, list[float]]:
    """What a run of DeepSpeed prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    call = [sys.executable, deepspeed_peer.__file__, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, list[float]] = json.loads(found[-1].removeprefix("RESULT ")) if found else {}
    return result


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_we_continue_from_deepspeed(stage: int, ranks: int, tmp_path: Path, paged: Callable[..., Any]) -> None:
    theirs = peer("make", tmp_path / "theirs", "--stage", stage, "--ranks", ranks)["next"]
    peer("universal", tmp_path / "theirs")
    for way in ("from-deepspeed", "from-universal"):
        assert command([way, str(tmp_path / "theirs"), str(tmp_path / way)]) == 0
        model = paged(PeerModel, precision="bf16")
        optimizer = deepoffload.CPUAdamW(param_groups(model), lr=1.0, max_grad_norm=1.0)
        deepoffload.TrainingState(model, optimizer).load(tmp_path / way)
        assert losses_of(model, optimizer, STEPS)[0] == pytest.approx(theirs[0], rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_continues_from_us(stage: int, ranks: int, tmp_path: Path, paged: Callable[..., Any]) -> None:
    """It compares what it has loaded with the files bit by bit."""
    model = paged(PeerModel, precision="bf16")
    optimizer = deepoffload.CPUAdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, max_grad_norm=1.0)
    losses_of(model, optimizer, 0)
    deepoffload.TrainingState(model, optimizer).save(tmp_path / "ours")
    assert command(["to-universal", str(tmp_path / "ours"), str(tmp_path / "universal")]) == 0
    theirs = peer("continue", tmp_path / "universal", "--stage", stage, "--ranks", ranks)["losses"]
    assert losses_of(model, optimizer, STEPS)[0] == pytest.approx(theirs[0], rel=LOSS_TOLERANCE)


def test_the_fixtures_can_be_made_again(tmp_path: Path) -> None:
    """The script that made the archive in tests/checkpoint/data still makes files that are read."""
    from deepoffload.checkpoint.convert.zero import read_zero

    peer("make", tmp_path / "zero2", "--stage", 2, "--ranks", 3)
    peer("universal", tmp_path / "zero2")
    check(read_zero(str(tmp_path / "zero2")), tmp_path / "zero2")
