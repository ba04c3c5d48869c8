"""Options of ``python -m deepoffload.estimate`` that contradict each other, or that nothing would look at."""

from __future__ import annotations

import json

import pytest

from deepoffload.estimate.__main__ import main
from tests.estimate.test_command import MACHINE, SMALL


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "say the model"),
        (["--parameters", "7B"], "--layers"),
        (["--config", "a", "--largest"], "different ways"),
        (["--config", "/nonexistent"], "config"),
        ([*SMALL, "--machine", "/nonexistent.json"], "nonexistent.json"),
        ([*SMALL, "--measure", "/nonexistent"], "nonexistent"),
        ([*SMALL, "--ranks", "2", "--link-rate", "0"], "--link-rate"),
        ([*SMALL, "--ranks", "2", "--deepspeed"], "--deepspeed"),
        ([*SMALL, "--ranks", "1e9"], "--ranks 1000000000"),
        ([*SMALL, "--inference", "--order", "vertical"], "--order is about training"),
        ([*SMALL, "--activations", "recompute"], "--activations is that of several micro-batches"),
        ([*SMALL, "--inference", "--accumulation", "4"], "--accumulation is about training"),
        ([*SMALL, "--inference", "--step-overlap", "none"], "--step-overlap is about training"),
        ([*SMALL, "--machine", "a", "--measure", "b"], "--measure"),
        ([*SMALL, "--link-rate", "4GB"], "--link-rate is that of several ranks: say --ranks N"),
        ([*SMALL, "--ranks", "1", "--transport", "group"], "--transport is that of several ranks: say --ranks N"),
        ([*SMALL, "--inference", "--transport", "group"], "--transport is about training"),
        ([*SMALL, "--arithmetic"], "--arithmetic is about the sizes in a configuration file: say --config"),
        (["--config", "a", "--heads", "4"], "--heads is that of a model by numbers: say --parameters"),
        (["--largest", "--heads", "4"], "--heads is that of a model by numbers"),
        (["--config", "a", "--vocabulary", "32000"], "--vocabulary is that of a model by numbers, or of --largest"),
        (["--largest", "--plot-budget", "a.png"], "--plot-budget is about one model: leave it or --largest out"),
        (["--largest", "--deepspeed"], "--deepspeed is about one model"),
        (["--largest", "--offload-activations", "nvme"], "say --checkpointing, too"),
        ([*SMALL, "--activation-budget", "0"], "--activation-budget is for --offload-activations"),
        ([*SMALL, "--inference", "--context", "64"], "--context is what --seq says of training: give one of them"),
        (["--zero-infinity", "--seq", "64"], "--seq is about a model: say one"),
        (["--zero-infinity", "--machine", "a"], "--machine is about a model: say one"),
        (["--plot-efficiency", "a.png", "--json"], "--json is about a model: say one"),
        ([*SMALL, "--tune", "a", "--transport", "group"], "--transport is what --tune chooses, or what its file says"),
        (["--config", "b", "--tune", "a", "--machine", "c", "--runs", "2"], "--runs is about this machine"),
        (["--config", "b", "--tune", "a", "--runs", "-1"], "'-1' is not a whole number of at least 0"),
        (["--model", "a:b", "--tune", "a", "--arithmetic"], "--arithmetic is about the sizes"),
        (["--zero-infinity", "--plot-efficiency", "curve.txt"], "--plot-efficiency"),
        ([*SMALL, "--device-budget", "1GiB"], "--device-budget is that of a device: describe it with --machine"),
    ],
)
def test_mistakes_are_named(arguments, named, capsys):
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


def test_two_ranks_by_the_file_have_a_link(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**MACHINE, "devices_per_node": 2}))
    assert main([*SMALL, "--machine", str(file), "--link-rate", "4GB"]) == 0


def test_a_launched_command_about_one_process_starts_no_others(monkeypatch, capsys):
    launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([*SMALL, "--deepspeed"]) == 2
    assert "--deepspeed, but a launcher has started 2 processes: start one alone" in capsys.readouterr().err
