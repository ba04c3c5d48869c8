"""What a process takes for a loss whose logits are made in tiles, against all logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.nn import functional as F

from tests.support.programs import Programs

LOGITS_MIB = 1024 * 32_000 * 4 / 2**20
"""All of them in fp32: 125 MiB."""

WAYS = ["tiled_loss", *(["linear_cross_entropy"] if hasattr(F, "linear_cross_entropy") else [])]


def peak(programs: Programs, directory: Path, which: str) -> tuple[float, float]:
    done = programs.run(Path(__file__).with_name("memory_program.py"), str(directory), which)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    return facts["peak"], facts["loss"]


def test_the_logits_of_all_tokens_are_never_there(programs: Programs, tmp_path: Path) -> None:
    most, loss = peak(programs, tmp_path, "all")
    assert most > 2.5 * LOGITS_MIB  # logits, their softmax, and their gradient
    for way in WAYS:
        found, its_loss = peak(programs, tmp_path, way)
        assert found < 0.5 * most, (way, found, most)
        assert its_loss == pytest.approx(loss, rel=1e-6)
