"""``python -m deepoffload.estimate --ranks N`` about ranks that compute on devices."""

from __future__ import annotations

import json
import re

import pytest

from deepoffload.estimate.__main__ import main
from tests.estimate.test_command import MACHINE, SMALL

DEVICES = {"device_memory_bytes": "8GiB", "flops_per_s": 1e13, "device_bytes_per_s": 1e12, "link_bytes_per_s": 1e10}


def test_ranks_on_devices_are_asked_about(tmp_path, capsys):
    """Each has a device, or two share one: memory, budgets and rates are divided. A step takes no less than what its
    bytes take over the bus and between ranks."""
    file = tmp_path / "machine.json"
    devices = {**DEVICES, "devices_per_node": 2, "ranks_per_device": 2, "host_bytes_per_s": 1e11}
    file.write_text(json.dumps({**MACHINE, **devices}))
    arguments = [*SMALL, "--machine", str(file), "--link-rate", "2GB", "--json", "--host-budget", "800MiB"]

    def found(*more: str) -> dict:
        assert main([*arguments, *more]) == 0
        return json.loads(capsys.readouterr().out)

    weights, steps = 40e6, {}
    for ranks, budget in ((2, None), (4, None), (2, "16MiB"), (4, "32MiB")):
        more = ["--ranks", str(ranks), *(("--device-budget", budget) if budget else ())]
        asked = found(*more)
        step, memory, sharing = asked["step"], asked["memory"], ranks // 2
        assert asked["machine"]["ranks_per_device"] == sharing and asked["budget_bytes"] == (800 << 20) // ranks
        assert memory["each_device_bytes"] == sharing * memory["device_bytes"]
        taken = next(row["device"] for row in memory["rows"] if row["name"] == "units on the device")
        assert taken == 16 << 20 if budget else taken > weights
        assert step["from_device_bytes"] == pytest.approx(weights, rel=0.01)
        most = 2 if budget else 1  # forward and backward
        assert weights * (most - 0.6) < step["to_device_bytes"] <= weights * most * 1.01
        between = step["gathered_bytes"] + step["reduced_bytes"]
        assert step["gathered_bytes"] == pytest.approx((ranks - 1) / ranks * step["to_device_bytes"])
        assert step["link_s"] >= between / 2e9
        assert step["seconds"] >= max(step["link_s"], sharing * step["to_device_bytes"] / 1e10)
        steps[ranks, budget] = step["seconds"]
        pinned = {row["name"]: row["pinned"] for row in memory["rows"] if row["pinned"]}
        assert set(pinned) == {"whole copies", "gradients on their way"}
    assert steps[2, None] < steps[2, "16MiB"] and steps[2, None] < steps[4, None]
    text = [argument for argument in arguments if argument != "--json"]
    assert main([*text, "--ranks", "4"]) == 0
    lines = capsys.readouterr().out
    assert "1 x 2 devices of 8.00 GiB, 2 ranks on each" in lines and "per device: " in lines
    assert re.search(r"over the bus of each device per step: [\d.]+ MiB to it, [\d.]+ MiB from it", lines)
    assert main([*text, "--ranks", "2", "--device-budget", "1MiB"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    least = re.match(r"Give it a device_budget of at least ([\d.]+ \w+), on a device that has as much", last)
    assert least is not None and main([*text, "--ranks", "2", "--device-budget", least[1]]) == 0
    capsys.readouterr()
    for ranks in (1, 2):  # the error is the engine's: of the host's budget, and not of a CPU's
        less = ["--host-budget", "1MiB", "--ranks", str(ranks)]
        assert main([*SMALL, "--machine", str(file), *less, "--json"]) == 1
        refused = json.loads(capsys.readouterr().out)
        names = re.search(r"[Rr]aise host_budget to at least (\d+) bytes", refused["problem"])
        assert "CPU" not in refused["problem"] and names is not None
        assert int(names[1]) == ranks * refused["smallest_budget_bytes"]
        enough = ["--host-budget", names[1], "--ranks", str(ranks)]
        assert main([*SMALL, "--machine", str(file), *enough]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("machine", "arguments", "named"),
    [
        ({"device_memory_bytes": 1e9, "flops_per_s": 1}, [], "without device_bytes_per_s, link_bytes_per_s"),
        ({"ranks_per_device": 2}, [], "ranks_per_device is about devices"),
        (DEVICES, ["--link-rate", "4GB"], "--link-rate is that of several ranks"),
        (DEVICES, ["--ranks", "2"], "2 on a node, which has devices_per_node = 1; one rank computes on each device"),
        ({**DEVICES, "devices_per_node": 2, "ranks_per_device": 2}, ["--ranks", "3"], "2 ranks at most compute"),
        ({**DEVICES, "devices_per_node": 2, "ranks_per_device": 2}, ["--ranks", "6"], "6 on a node"),
        ({**DEVICES, "nodes": 2, "devices_per_node": 2}, ["--ranks", "3"], "2 nodes, which get equal numbers"),
        (DEVICES, ["--device-budget", "9GiB"], "but a device has 8.00 GiB"),
        ({**DEVICES, "devices_per_node": 2}, ["--ranks", "2", "--device-budget", "0"], "a device budget of 0 bytes"),
        ({}, ["--device-budget", "1GiB"], "has no device"),
        ({**DEVICES, "devices_per_node": 2, "process_bytes": "1GiB"}, [], "do not fit in a host's memory"),
    ],
)
def test_mistakes_about_devices_are_named(machine, arguments, named, tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**MACHINE, **machine}))
    assert main([*SMALL, "--machine", str(file), *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("budget", [None, "16MiB"])
def test_what_runs_again_in_backward_is_backwards(budget, tmp_path, capsys):
    """With checkpoints the forward takes as long as without, and gradients are added up in backward, also where the
    device holds a part of the weights."""
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**MACHINE, **DEVICES, "devices_per_node": 2, "host_bytes_per_s": 1e11}))
    of_ranks = ["--ranks", "2", "--link-rate", "1GB", *(("--device-budget", budget) if budget else ())]
    for arguments in ([], ["--machine", str(file), *of_ranks]):
        steps = []
        for more in ([], ["--checkpointing"]):
            said = ["--machine", str(file.with_name("cpu.json"))] if not arguments else arguments
            file.with_name("cpu.json").write_text(json.dumps(MACHINE))
            assert main([*SMALL, *said, *more, "--json"]) == 0
            steps.append(json.loads(capsys.readouterr().out)["step"])
        plain, again = steps
        assert again["forward_s"] == pytest.approx(plain["forward_s"], rel=0.1)
        assert again["backward_s"] > plain["backward_s"] > again["reduced_bytes"] / 1e9


def test_the_bus_is_named_where_its_two_directions_follow_each_other(tmp_path, capsys):
    """All weights go to the device in forward, and all gradients come from it in backward: no direction is busy for
    more than half of the step."""
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**MACHINE, **DEVICES, "devices_per_node": 2, "link_bytes_per_s": 1e8}))
    for ranks, more in (("1", []), ("2", ["--link-rate", "4GB"])):
        assert main([*SMALL, "--machine", str(file), "--ranks", ranks, *more, "--json"]) == 0
        step = json.loads(capsys.readouterr().out)["step"]
        each = (step["to_device_bytes"] / 1e8, step["from_device_bytes"] / 1e8)
        assert max(each) < 0.6 * step["seconds"] and sum(each) > 0.8 * step["seconds"]
        assert step["bound"] == "the bus between host and device", step
