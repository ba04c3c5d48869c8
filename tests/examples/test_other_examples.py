"""The short examples run as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import Programs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(programs: Programs, tmp_path: Path) -> Callable[..., str]:
    """Runs a script there, in a process that is forked when torch is imported; what it prints."""

    def run(script: Path, *arguments: str | Path | int) -> str:
        done = programs.run(script, *map(str, arguments), cwd=tmp_path, timeout_s=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_fine_tunes_a_transformers_model_and_goes_on_from_what_it_saved(run, tmp_path):
    pytest.importorskip("transformers")
    script = ROOT / "examples" / "finetune_hf.py"
    first = run(script, "--steps", 4, "--out", "tuned")
    second = run(script, "--steps", 1, "--model", "tuned", "--out", "again")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0]
    assert float(re.findall(r"loss ([\d.]+)", second)[0]) < losses[0] - 0.5
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.slow
def test_trains_with_deepspeeds_calls_and_configuration(run, tmp_path):
    folder = ROOT / "examples"
    output = run(folder / "deepspeed_style.py", "--deepspeed_config", folder / "ds_config.json")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.5
    assert list(tmp_path.iterdir()) == []


def test_the_idea_has_the_losses_of_an_ordinary_loop_and_points_at_parts_that_exist(run):
    output = run(ROOT / "examples" / "the_idea.py")
    paged, plain = re.findall(r"^losses, \w+: (.*)$", output, re.MULTILINE)
    assert paged == plain
    for part in re.findall(r"[a-z]+/[a-z_]+", output.split("puts it right")[1]):
        folder = ROOT if part.startswith("csrc") else ROOT / "deepoffload"
        assert (folder / part).exists() or (folder / f"{part}.py").exists(), part
