"""The short examples run as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fine_tunes_a_transformers_model_and_goes_on_from_what_it_saved(tmp_path):
    pytest.importorskip("transformers")
    script = ROOT / "examples" / "finetune_hf.py"
    first = run(tmp_path, script, "--steps", 4, "--out", "tuned")
    second = run(tmp_path, script, "--steps", 1, "--model", "tuned", "--out", "again")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0]
    assert float(re.findall(r"loss ([\d.]+)", second)[0]) < losses[0] - 0.5
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.slow
def test_trains_with_deepspeeds_calls_and_configuration(tmp_path):
    folder = ROOT / "examples"
    output = run(tmp_path, folder / "deepspeed_style.py", "--deepspeed_config", folder / "ds_config.json")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5
    assert list(tmp_path.iterdir()) == []


def test_the_idea_has_the_losses_of_an_ordinary_loop_and_points_at_parts_that_exist(tmp_path):
    script = ROOT / "examples" / "the_idea.py"
    output = run(tmp_path, script)
    paged, plain = re.findall(r"^losses, \w+: (.*)$", output, re.MULTILINE)
    assert paged == plain
    for part in re.findall(r"[a-z]+/[a-z_]+", output.split("puts it right")[1]):
        folder = ROOT if part.startswith("csrc") else ROOT / "deepoffload"
        assert (folder / part).exists() or (folder / f"{part}.py").exists(), part
