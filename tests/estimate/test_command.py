"""``python -m deepoffload.estimate``, machines, questions and the published results."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepoffload.config import AccumulationOrder, ActivationMode, Config, Precision
from deepoffload.config.units import parse_bytes
from deepoffload.errors import ConfigError
from deepoffload.estimate import Batch, MachineSpec, estimate, from_counts, largest_model, read_machine
from deepoffload.estimate.__main__ import main
from deepoffload.estimate.advice import advice
from deepoffload.estimate.dry_run import dry_run
from deepoffload.estimate.measure import measure_ops
from deepoffload.estimate.progress import MeasuringProgress
from deepoffload.estimate.zero_infinity import (
    STRATEGIES,
    Moved,
    arithmetic_intensity,
    bandwidth_for,
    compare_bandwidths,
    compare_largest,
    efficiency,
)
from deepoffload.schedule.cost_model import StepOverlap

ROOT = Path(__file__).parents[2]
SMALL = ["--parameters", "20M", "--layers", "4", "--hidden", "256", "--seq", "64", "--vocabulary", "1000"]
MACHINE = {"host_memory_bytes": "1 GiB", "nvme_bytes": "10GB", "nvme_endurance_bytes": "600TB", "process_bytes": 0}


@pytest.fixture
def machine_file(tmp_path: Path) -> str:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE))
    return str(file)


def test_table_and_json_say_the_same(machine_file, capsys):
    arguments = [*SMALL, "--machine", machine_file, "--host-budget", "100MiB"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and "It fits." in text
    assert found["memory"]["nvme_bytes"] > 0 and found["step"]["written_bytes"] > 0
    assert f"{found['step']['seconds']:.3g} s" in text and "endurance: the drives" in text
    assert found["step"]["steps_of_endurance"] == pytest.approx(600e12 / found["step"]["written_bytes"])
    assert found["smallest_budget_bytes"] < found["budget_bytes"] == 100 << 20


def test_a_budget_above_the_room_for_it_is_explained(machine_file, capsys):
    """What the engine takes by itself knows of no activations."""
    assert main([*SMALL, "--machine", machine_file, "--batch", "40"]) == 0
    text = capsys.readouterr().out
    budget = r"host budget: 716.80 MiB \(not said: what the engine takes by itself\) \(the least is"
    less = r"leave room for ([\d.]+) MiB, which is less, but the model does not fill its budget"
    assert re.search(budget, text) and (room := re.search(less, text)) and float(room[1]) < 716.8
    assert main([*SMALL, "--machine", machine_file]) == 0
    text = capsys.readouterr().out
    assert "leave room for" in text and "which is less" not in text
    leave = ["--checkpointing", "--offload-activations", "nvme", "--host-budget", "160MiB"]
    assert main([*SMALL, "--machine", machine_file, *leave]) == 0
    assert "host budget: 140.00 MiB (160.00 MiB as said, less 20.00 MiB for activations)" in capsys.readouterr().out


def test_what_does_not_fit_says_so_and_what_would(machine_file, capsys):
    assert main([*SMALL, "--machine", machine_file, "--host-budget", "1MiB"]) == 1
    text = capsys.readouterr().out
    assert "It does not fit." in text and "(the least is" in text
    assert text.splitlines()[-1].startswith("Give it a host_budget of at least")
    assert main([*SMALL, "--machine", machine_file, "--host-budget", "100MiB", "--nvme-budget", "0"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "or let it use 17" in last and "of the disk (nvme_budget, offload_param and offload_optimizer)" in last


def test_a_disk_is_named_as_a_way_out_where_nobody_gave_one(tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"host_memory_bytes": "1 GiB"}))
    for machine in ([], ["--machine", str(file)]):
        assert main([*SMALL, *machine, "--host-budget", "100MiB"]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.search(
            r"or a disk with [\d.]+ MiB free: try it with --measure DIRECTORY, and train with nvme_path", last
        )
    file.write_text(json.dumps({"host_memory_bytes": "300 MiB", "process_bytes": "290 MiB"}))
    assert main([*SMALL, "--machine", str(file)]) == 1
    assert "disk" not in capsys.readouterr().out.splitlines()[-1]  # activations need all of the memory


GIB = 1 << 30
MIB = 1 << 20
DISK = re.compile(
    r"(?:a disk with (?P<free>[\d.]+ \w+) free|"
    r"(?:more NVMe:|let it use) (?P<used>[\d.]+ \w+) (?:for it|of the disk)[^:]*?)"
    r"(?: and host_budget = (?P<budget>[\d.]+ \w+))?(?=:|\.$)"
)
"""NVMe as a way out, and the budget that goes with it."""


def test_the_last_line_says_what_works():
    """Over budgets, memories and disks: the sentence agrees with the table, and what it names fits. Each two of them
    are tried together, and most of the three."""
    subject = replace(from_counts(20_000_000, 4, 256, vocabulary=1000), loss_of=None)
    given, disks, wrong, seen = 0, 0, [], set()
    for m, memory in enumerate((300 * MIB, 420 * MIB, 1 * GIB)):
        for b, budget in enumerate((1 * MIB, 60 * MIB, None)):
            for d, (disk, no_nvme) in enumerate(((0, None), (40 * MIB, None), (10 * GIB, None), (10 * GIB, 0))):
                if b == (m + d) % 3:
                    continue
                machine = MachineSpec(host_memory_bytes=memory, nvme_bytes=disk, process_bytes=64 * MIB)
                config = Config(precision=Precision.BF16, host_budget=budget, nvme_budget=no_nvme)
                found = estimate(subject, machine, config)
                said = advice(found)
                seen.add(said.split(" ")[0] + said.split(" ")[1])
                numbers = re.findall(r"host_budget (?:of at least|from|of) ([\d.]+ [KMGT]?i?B)", said)
                for number in numbers:
                    given += 1
                    again = replace(found.config, host_budget=parse_bytes(number))
                    if not estimate(subject, machine, again).fits:
                        wrong.append(f"{memory} {budget} {disk}: {said}")
                for way in DISK.finditer(said):
                    disks += 1
                    nbytes = parse_bytes(way["free"] or way["used"])
                    budget_said = parse_bytes(way["budget"]) if way["budget"] else budget
                    again = replace(found.config, host_budget=budget_said)
                    bigger = replace(machine, nvme_bytes=nbytes if way["free"] else 10 * GIB)
                    if way["used"]:
                        again = replace(again, nvme_budget=nbytes)
                    if not estimate(subject, bigger, again).fits:
                        wrong.append(f"{memory} {budget} {disk} {no_nvme}: {said}")
                if found.fits != said.startswith("Train"):
                    wrong.append(f"{memory} {budget} {disk}: fits is {found.fits}: {said}")
    assert not wrong, "\n".join(wrong)
    assert given > 5 and disks > 10 and len(seen) > 2


def test_both_orders_of_accumulation_are_shown(machine_file, capsys):
    command = [*SMALL, "--machine", machine_file, "--host-budget", "50MiB", "--accumulation", "4"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step, other = found["step"], found["other_order"]
    assert (step["order"], other["order"]) == ("horizontal", "vertical")
    assert other["read_bytes"] < 0.8 * step["read_bytes"] and other["written_bytes"] <= step["written_bytes"]
    assert other["seconds"] < step["seconds"]
    assert other["host_peak_bytes"] > found["memory"]["host_peak_bytes"]
    assert "vertical: what does not stay in memory moves once per step" in found["placement"]
    assert main([*command, "--order", "vertical"]) == 0
    text = capsys.readouterr().out
    assert f"step in vertical order: {other['seconds']:.3g} s" in text
    assert f"in horizontal order: {step['seconds']:.3g} s" in text
    peaks = []
    for mode in ("keep", "recompute"):  # units are whole layers with this budget
        more = ["--host-budget", "200MiB", "--order", "vertical", "--activations", mode, "--json"]
        assert main([*command, *more]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        peaks.append(memory["host_peak_bytes"])
        rows = {row["name"]: row["pageable"] for row in memory["rows"]}
        assert rows["gradients that wait"] == 4 * 1000 * 256 * 2, "of the head's weight, which is the embedding's"
    assert peaks[1] < peaks[0]
    assert main([*SMALL, "--machine", machine_file, "--order", "vertical"]) == 2
    assert "say --accumulation N" in capsys.readouterr().err
    assert main([*command, "--host-budget", "100MiB", "--ranks", "2", "--link-rate", "4GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step, other = found["step"], found["other_order"]
    assert other["gathered_bytes"] < 0.5 * step["gathered_bytes"], "once per pass"


def test_a_disk_is_needed_for_an_nvme_budget(tmp_path, capsys):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"host_memory_bytes": "1 GiB"}))
    for machine in (["--machine", str(file)], []):
        assert main([*SMALL, *machine, "--nvme-budget", "10GB"]) == 2
        assert "the machine has no NVMe: measure a disk (--measure DIRECTORY)" in capsys.readouterr().err


def test_what_cannot_fit_is_said_before_anything_is_measured(tmp_path, capsys):
    said = [*SMALL, "--measure", str(tmp_path), "--host-budget", "50MiB", "--nvme-budget", "50MiB"]
    assert main(said) == 1
    captured = capsys.readouterr()
    assert "measuring" not in captured.err
    last = captured.out.splitlines()[-1]
    assert last.startswith("Give it a host_budget of at least") and "more NVMe: " in last


def test_progress_is_shown_while_operators_are_measured(capsys):
    subject = from_counts(200_000, 2, 64, Batch(1, 16), vocabulary=100)
    with MeasuringProgress(sys.stderr) as progress:
        times = measure_ops(dry_run(subject.module, subject.loss_of), progress=progress)
    captured = capsys.readouterr()
    assert times and "measuring: operators of the model, round (15 of 15)" in captured.err
    assert not captured.out


def test_the_smallest_budget_is_one_that_fits_and_less_is_not():
    machine = MachineSpec(nvme_bytes=1 << 40)
    subject = from_counts(20_000_000, 4, 256, Batch(1, 64), vocabulary=1000)
    first = estimate(subject, machine, Config(precision=Precision.BF16))
    assert first.smallest_bytes is not None
    for budget, fits in ((first.smallest_bytes, True), (first.smallest_bytes - 8192, False)):
        assert estimate(subject, machine, Config(precision=Precision.BF16, host_budget=budget)).fits is fits


def test_activations_that_leave_no_memory_for_the_model_are_named():
    machine = MachineSpec(host_memory_bytes=300 << 20, nvme_bytes=1 << 40)
    found = estimate(from_counts(20_000_000, 4, 256, Batch(64, 64), vocabulary=1000), machine, Config())
    assert "activations" in found.problem and not found.fits and found.smallest_bytes
    assert found.room_bytes == 0


def test_beside_a_device_the_host_updates_in_backward_what_it_has_time_for():
    """1.24 B parameters, 16 k tokens, a device of some 450 TFLOP/s, 16 cores with 150 GB/s: what the clock says of the
    step that docs/estimators.md shows. Without room for what guesses keep, they are those of deferred updates."""
    machine = MachineSpec(
        flops_per_s=4.9e14, device_memory_bytes=80 << 30, device_bytes_per_s=3e12, link_bytes_per_s=5e10,
        host_memory_bytes=128 << 30, host_bytes_per_s=1.5e11,
    )  # fmt: skip
    subject = from_counts(1_240_000_000, 24, 2048, Batch(16, 1024), vocabulary=8192)
    config = Config(precision=Precision.BF16)

    def seconds(overlap: StepOverlap, host_budget: int | None = None) -> float:
        step = estimate(subject, machine, replace(config, step_overlap=overlap, host_budget=host_budget)).step
        assert step is not None and step.model_s == pytest.approx(0.31, abs=0.005)
        return step.seconds

    deferred, speculative = seconds(StepOverlap.DEFERRED), seconds(StepOverlap.SPECULATIVE)
    assert deferred == pytest.approx(0.46, abs=0.01) and 0.31 < speculative <= 0.34
    assert seconds(StepOverlap.SPECULATIVE, 17 << 30) == pytest.approx(deferred)


def test_a_device_takes_the_activations():
    config = Config(precision=Precision.BF16)
    one = MachineSpec(host_memory_bytes=1 << 40, device_memory_bytes=32 << 30)
    subject = from_counts(20_000_000, 4, 256, Batch(1, 64), vocabulary=1000)
    alone = estimate(subject, one, config).memory
    ring = 512 << 20  # for gradients on their way
    assert alone is not None and alone.pinned_bytes == pytest.approx(20e6 * 14 + ring, rel=0.01)
    together = replace(config, gradient_accumulation_steps=4, accumulation_order=AccumulationOrder.VERTICAL)
    kept, again = (
        estimate(subject, one, replace(together, activations=mode))
        for mode in (ActivationMode.AUTO, ActivationMode.RECOMPUTE)
    )
    assert kept.memory is not None and again.memory is not None and kept.run is not None
    saved = kept.run.saved_bytes - kept.run.head_bytes
    shared = 1000 * 256 * 2  # the gradient of the head, which is the embedding's: it waits, once for each micro-batch
    assert kept.memory.device_bytes == alone.device_bytes + 3 * saved + 4 * shared
    assert again.memory.device_bytes < kept.memory.device_bytes - 2 * saved
    assert kept.memory.host_bytes == alone.host_bytes


@pytest.mark.slow
def test_the_largest_model_fits_and_more_memory_gives_a_larger_one():
    config = Config(precision=Precision.BF16)
    sizes = []
    for memory in (1 << 30, 2 << 30):
        found = largest_model(MachineSpec(host_memory_bytes=memory), config, Batch(1, 32), vocabulary=1000)
        assert found.fits and found.memory is not None and found.memory.host_bytes <= memory
        sizes.append(found.subject.num_parameters)
    assert 1.5 * sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ('{"model_type": ["llama"]}', "model_type"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers"),
        ('{"model_type": "llama", "rope_theta": NaN}', "NaN"),
        (
            '{"model_type": "llama", "num_hidden_layers": 0}',
            "num_hidden_layers = 0: expected a whole number of at least 1",
        ),
        ('{"model_type": "llama", "num_hidden_layers": -3}', "num_hidden_layers = -3"),
        ('{"model_type": "llama", "num_hidden_layers": 2.5}', "num_hidden_layers = 2.5"),
        ('{"model_type": "llama", "num_hidden_layers": true}', "num_hidden_layers = True"),
        ('{"model_type": "llama", "hidden_size": 1e999}', "hidden_size = inf"),
        ('{"model_type": "gpt2", "n_embd": 1000000000000}', "n_embd = 1,000,000,000,000: more than any model has"),
        ('{"model_type": "clip", "text_config": {"num_hidden_layers": 0}}', "text_config: num_hidden_layers = 0"),
        ('{"model_type": "llama", "architectures": [5]}', "architectures = [5]"),
        ('{"model_type": "llama", "architectures": ["BertModel"]}', "architectures names BertModel"),
        ("[" * 100_000, "nested more deeply"),
    ],
)
def test_configurations_that_no_model_has(settings, named, tmp_path, capsys):
    (tmp_path / "config.json").write_text(settings)
    assert main(["--config", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and "config.json" in said


@pytest.mark.parametrize(
    "arguments",
    [["--layers", "0"], ["--batch", "-1"], ["--host-budget", "lots"], ["--budget", "1GiB"], ["--order", "x"]],
)
def test_mistakes_in_options_take_a_line_and_a_hint(arguments, capsys):
    assert main([*SMALL, *arguments]) == 2
    mistake, hint = capsys.readouterr().err.splitlines()
    assert arguments[0] in mistake and hint == "(python -m deepoffload.estimate --help lists the options)"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nodes": 0}, "nodes"),
        ({"devices_per_node": -1}, "devices_per_node"),
        ({"nodes": 10**9}, "at most 65536 ranks"),
        ({"flops_per_s": 0}, "flops_per_s"),
        ({"nvme_read_bytes_per_s": "fast"}, "nvme_read_bytes_per_s"),
        ({"host_memory_bytes": "16 Gigs"}, "host_memory_bytes"),
        ({"gpu_memory": 5}, "gpu_memory"),
    ],
)
def test_a_machine_file_that_makes_no_sense(tmp_path, changes, named):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE | changes))
    with pytest.raises(ConfigError, match=named):
        read_machine(file)


def test_the_tools_run(machine_file):
    for arguments in (
        ["estimate_memory.py", "--zero-infinity"],
        ["estimate_model_states.py", "--total-params", "1e7", "--largest-layer-params", "1e6"],
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / arguments[0]), *arguments[1:]],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )
        assert done.returncode == 0 and "ZeRO-" in done.stdout, done.stderr


def test_the_tool_for_numbers_alone_names_mistakes(monkeypatch, capsys):
    tool = ROOT / "tools" / "estimate_model_states.py"
    monkeypatch.setattr(sys, "argv", [str(tool), "--total-params", "many"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(tool), run_name="__main__")
    mistake, hint = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and "--total-params" in mistake and "--help" in hint


def test_efficiency_is_the_papers_formula():
    assert arithmetic_intensity(Moved.PARAMETERS, 1024) == 1024
    assert arithmetic_intensity(Moved.OPTIMIZER, 1024) == 256
    assert arithmetic_intensity(Moved.ACTIVATIONS, 1024, hidden=2048, interval=2) == 24 * 2048 * 2
    for share in (0.1, 0.5, 0.9):
        assert efficiency(1024, bandwidth_for(share, 1024, 7e13), 7e13) == pytest.approx(share)
    with pytest.raises(ConfigError, match="tokens"):
        arithmetic_intensity(Moved.PARAMETERS, 0)


def test_the_published_results_come_out_of_the_formulas():
    largest = compare_largest()
    assert [row.what for row in largest] == [strategy.name for strategy in STRATEGIES]
    assert all(abs(row.deviation) < 0.2 for row in largest)
    tiers = {row.what: row.note for row in largest}
    assert tiers["ZeRO-Infinity, NVMe"].endswith("nvme") and tiers["ZeRO-Infinity, CPU"].endswith("host")
    exact = {row.what: row.deviation for row in compare_bandwidths()}
    assert abs(exact["parameters and gradients, 50 %, batch 1"]) < 0.05


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_pictures(tmp_path, machine_file):
    curve, budget = tmp_path / "curve.png", tmp_path / "budget.svg"
    arguments = [*SMALL, "--machine", machine_file, "--plot-efficiency", str(curve), "--plot-budget", str(budget)]
    assert main(arguments) == 0
    assert curve.stat().st_size > 10_000 and budget.stat().st_size > 1_000


def test_ranks_are_asked_about(machine_file, capsys):
    arguments = [*SMALL, "--machine", machine_file, "--host-budget", "200MiB", "--link-rate", "1GB", "--ranks"]
    assert main([*arguments, "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["devices_per_node"] == 2 and found["machine"]["rank_gather_bytes_per_s"] == 1e9
    assert found["budget_bytes"] == 100 << 20, "a budget is a host's"
    step = found["step"]
    assert step["gathered_bytes"] > 0 and step["link_s"] > (step["gathered_bytes"] + step["reduced_bytes"]) / 1e9
    assert found["memory"]["node_nvme_bytes"] == 2 * found["memory"]["nvme_bytes"] > 0
    assert main([*arguments, "2"]) == 0
    text = capsys.readouterr().out
    assert found["placement"] in text and "of 2 ranks" in text
    said = re.search(
        r"host budget per rank: 100.00 MiB \(200.00 MiB for the 2 of a host, as said\), of which ([\d.]+) MiB for "
        r"shards and ([\d.]+) MiB for whole copies",
        text,
    )
    assert said is not None and float(said[1]) + float(said[2]) == pytest.approx(100, abs=0.01)
    shards = re.search(r"budget of each of the 2 ranks: ([\d.]+) MiB of memory for its shards", text)
    assert shards is not None and float(shards[1]) == pytest.approx(float(said[1]), abs=0.05)
    assert re.search(r"by all ranks of a node [\d.]+ MiB read", text) and "from other ranks per step: weights" in text
    assert main([*arguments, "2", "--transport", "group", "--json"]) == 0
    by_group = json.loads(capsys.readouterr().out)
    assert _on_their_way(by_group) > _on_their_way(found), "collectives receive all parts at once"


def _on_their_way(found: dict) -> int:
    return next(row["pageable"] for row in found["memory"]["rows"] if row["name"] == "gradients on their way")


def test_a_refused_budget_of_ranks_names_the_hosts(machine_file, capsys):
    arguments = [*SMALL, "--machine", machine_file, "--ranks", "4", "--host-budget"]
    assert main([*arguments, "2MiB"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    least = re.match(r"Give it a host_budget of at least ([\d.]+ \w+) ", last)
    assert least is not None, last
    assert main([*arguments, least[1]]) == 0
