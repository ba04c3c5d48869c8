"""The main job, as a user starts it: in a separate process, on real text, on a real disk."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Programs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = ("--size", "10m", "--seq", "32", "--batch", "2", "--lr", "1e-3")


FIVE_STEPS = (*SMALL, "--steps", 5, "--accumulate", 2)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_as_a_user(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def run(programs: Programs) -> Run:
    """The same in a process that is forked when torch is imported."""
    return lambda *arguments: programs.run(SCRIPT, *map(str, arguments), timeout_s=240)


@pytest.fixture(scope="module")
def in_fp32(run: Run, nvme_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five steps, next to plain PyTorch."""
    return compared(run, nvme_path, tmp_path_factory.mktemp("fp32"), "--precision", "fp32", "--host-budget", "32MiB")


def compared(run: Run, nvme_path: Path, folder: Path, *more: str) -> dict[str, Any]:
    """What the run said, as JSON and as ``stdout``."""
    done = run(*FIVE_STEPS, *more, "--compare", "--json", folder / "result.json", "--nvme-path", nvme_path)
    assert done.returncode == 0, done.stderr
    assert list(nvme_path.iterdir()) == []
    return {**json.loads((folder / "result.json").read_text()), "stdout": done.stdout}


def check(numbers: dict[str, Any]) -> None:
    budget = numbers["settings"]["host_budget"]
    assert numbers["model_bytes"] >= 4 * budget
    assert numbers["losses"][0] == numbers["plain"]["losses"][0]
    assert numbers["losses"] == pytest.approx(numbers["plain"]["losses"], rel=2e-3)
    assert numbers["losses"][-1] < numbers["losses"][0] - 0.5
    assert numbers["stats"]["host_peak_bytes"] <= budget
    # The first step has no step before it to make: updates run with the next forward.
    assert min(numbers["disk_bytes"][1:]) > numbers["parameters"] * 16
    # What steps say one by one is what is said of all of them.
    mean = sum(numbers["disk_bytes"][1:]) / len(numbers["disk_bytes"][1:])
    said = f"disk traffic per step: {mean / 1e9:.2f} GB, {mean / numbers['parameters']:.1f} bytes per parameter"
    first = f"(the first one {numbers['disk_bytes'][0] / 1e9:.2f} GB: its updates run in the next)"
    assert f"{said} {first}" in numbers["stdout"]
    assert "optimizer state" in numbers["stdout"] and "largest difference" in numbers["stdout"]


@pytest.mark.slow
def test_trains_beyond_its_budget_with_the_losses_of_plain_pytorch(nvme_path, tmp_path):
    check(compared(run_as_a_user, nvme_path, tmp_path, "--precision", "bf16"))


@pytest.mark.slow
def test_trains_in_fp32_too(in_fp32):
    check(in_fp32)


@pytest.mark.slow
def test_two_processes_train_as_one_that_accumulates(in_fp32, nvme_path, tmp_path):
    arguments = [*FIVE_STEPS[:-2], "--precision", "fp32", "--nvme-path", nvme_path, "--host-budget", "32MiB"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    both = subprocess.run(
        [*map(str, launcher), *map(str, arguments), "--save", tmp_path / "out", "--json", tmp_path / "two.json"],
        env={**environment(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert both.returncode == 0, both.stderr
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["losses"] == pytest.approx(in_fp32["losses"], rel=1e-6)
    assert two["stats"]["world_size"] == 2
    assert two["stats"]["host_budget_bytes"] == in_fp32["stats"]["host_budget_bytes"] / 2
    assert both.stdout.count("step 5/5") == 1 and "from other ranks" in both.stdout
    assert "memory, one rank" in both.stdout
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 9_900_000 * 4


@pytest.mark.slow
def test_own_text_checkpointing_generation_and_saving(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    out = tmp_path / "out"
    done = run(
        *SMALL, "--steps", 2, "--data", text, "--checkpointing", "--generate", 3, "--save", out, "--nvme-path", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "the quick brown fox" in done.stdout
    saved = out / "model.safetensors"
    assert saved.stat().st_size > 9_900_000 * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_losses_of_one_that_is_not(run, tmp_path):
    out = tmp_path / "out"
    arguments = (*SMALL, "--nvme-path", tmp_path, "--steps", 4, "--save-every", 1)
    whole = run(*arguments, "--save", tmp_path / "whole", "--json", tmp_path / "whole.json")
    assert whole.returncode == 0, whole.stderr
    resuming = (*arguments, "--save", out, "--resume")
    child = subprocess.Popen(command(*resuming), env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "latest").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.002)
    child.kill()
    child.wait()
    done = run(*resuming, "--json", tmp_path / "resumed.json")
    assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "whole.json").read_text())["losses"]
    losses = json.loads((tmp_path / "resumed.json").read_text())["losses"]
    assert "resumed after step" in done.stdout and len(losses) <= 3
    assert losses == expected[len(expected) - len(losses) :]
    assert sorted(path.name for path in out.iterdir()) == ["global_step3", "global_step4", "latest"]


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    child = subprocess.Popen(
        command(*SMALL, "--steps", 100_000, "--nvme-path", tmp_path),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step"):
                break
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=200)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130, error
    assert "interrupted" in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host-budget", "lots"], "argument --host-budget: expected bytes"),
        (["--host-budget", "0"], "argument --host-budget: expected more than 0 bytes"),
        (["--steps", "0"], "argument --steps: expected a whole number of at least 1"),
        (["--lr", "-1"], "argument --lr: expected a number of at least 0"),
        (["--size", "7b"], "invalid choice"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
        (["--nvme-path", "/nowhere"], "--nvme-path /nowhere: does not exist"),
        (["--save", "/nowhere/out"], "--save /nowhere/out: its directory does not exist"),
        (["--json", "/"], "--json /: is a directory"),
        (["--plain", "--compare"], "--plain is the other side"),
        (["--save-every", "3"], "--save-every needs --save DIR"),
        (["--resume"], "--resume needs --save DIR"),
        (["--resume", "--save", "out"], "--resume needs --save-every N"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    parse_options = importlib.import_module("gpt.options").parse_options
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", ["10m", "125m", "320m", "1.2b"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_default_budget_is_at_most_a_quarter_of_the_state(size, precision, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    parse_options = importlib.import_module("gpt.options").parse_options
    options = parse_options(["--size", size, "--precision", precision])
    assert options.model_bytes >= 4 * options.host_budget
    assert options.num_parameters == pytest.approx(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], rel=0.05)


def test_too_little_text_is_refused(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("short")
    done = run(*SMALL, "--data", text)
    assert done.returncode == 1
    assert "--data has 5 bytes of text, too few for --seq 32" in done.stderr
    assert done.stdout == ""


def test_a_budget_below_the_working_set_is_refused_with_the_table(run, tmp_path):
    done = run(*SMALL, "--host-budget", "2MiB", "--nvme-path", tmp_path)
    assert done.returncode == 1
    assert "raise host_budget" in done.stderr.lower() and "windows + ring" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
