"""``python -m deepoffload.estimate --tune``: candidates, the choice, the runs, and what is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepoffload.config import AccumulationOrder, Config, Precision, parse_config
from deepoffload.config.tools import AutotuningConfig
from deepoffload.device import Tier
from deepoffload.errors import BudgetError, ConfigError
from deepoffload.estimate import MachineSpec
from deepoffload.estimate.__main__ import main
from deepoffload.estimate.decoder import DecoderShape
from deepoffload.estimate.tuning import measured
from deepoffload.estimate.tuning.candidates import ACCUMULATION_MAX, SIZES_MAX, Candidate, Choices, micro_batches
from deepoffload.estimate.tuning.choice import (
    CandidateRow,
    Measurement,
    Prediction,
    best,
    micro_batches_to_run,
    next_to_run,
    ranked,
)
from deepoffload.estimate.tuning.measured import StepsRun, run_steps
from deepoffload.estimate.tuning.model import ModelForm
from deepoffload.estimate.tuning.prediction import CostModel
from deepoffload.estimate.tuning.tuner import Tuner
from deepoffload.estimate.tuning.written import settings_of, settings_to_run
from deepoffload.tuned_steps import step_seconds

SIZES = ["--parameters", "20M", "--layers", "4", "--hidden", "256", "--vocabulary", "8000", "--seq", "512"]
FORM = ModelForm(32, shape=DecoderShape(2, 64, 2, 500))
MACHINE = MachineSpec(host_memory_bytes=4 << 30, nvme_bytes=10**10, process_bytes=0)
VERTICAL, HORIZONTAL = AccumulationOrder.VERTICAL, AccumulationOrder.HORIZONTAL

candidates = st.builds(
    Candidate,
    st.integers(1, 8),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([HORIZONTAL, VERTICAL]),
)
predictions = st.lists(
    st.builds(
        Prediction,
        candidates,
        st.just(64),
        seconds=st.floats(0.01, 100),
        problem=st.sampled_from(["", "", "", "too large"]),
    ),
    unique_by=lambda each: each.candidate,
    max_size=12,
)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 5000), st.integers(1, 8) | st.none())
def test_micro_batches_divide_the_batch(batch: int, least: int, most: int, count: int | None) -> None:
    fitting = [
        size for size in range(-(-batch // ACCUMULATION_MAX), batch + 1) if batch % size == 0 and least <= size <= most
    ]
    if not fitting:
        with pytest.raises(ConfigError, match="no micro-batch from"):
            micro_batches(batch, least, most, count)
        return
    found = micro_batches(batch, least, most, count)
    assert set(found) <= set(fitting) and list(found) == sorted(set(found))
    assert len(found) == min(len(fitting), count or SIZES_MAX)
    assert found[-1] == fitting[-1] and (len(found) == 1 or found[0] == fitting[0])


@settings(deadline=None)
@given(st.integers(1, 96))
def test_every_candidate_trains_with_the_same_batch(batch: int) -> None:
    found = Choices(batch, micro_batches(batch), offload_activations=(None, Tier.NVME)).candidates()
    assert all(each.micro_batch * each.accumulation == batch for each in found)
    assert len(set(found)) == len(found)
    assert not any(each.is_vertical and each.accumulation == 1 for each in found)
    assert not any(each.offload_activations and not each.checkpointing for each in found)


@settings(deadline=None)
@given(predictions)
def test_runs_begin_with_the_best_and_compare_both_orders(found: list[Prediction]) -> None:
    order = ranked(found)
    assert sorted(each.weighed for each in order) == [each.weighed for each in order]
    assert len(order) == sum(not each.problem for each in found)
    done: list[Candidate] = []
    while (following := next_to_run(order, done)) is not None:
        assert following.candidate not in done
        done.append(following.candidate)
    assert len(done) == len(order)
    if order:
        assert done[0] == order[0].candidate
    if len(done) > 1 and done[0].is_vertical and not all(each.is_vertical for each in done):
        assert not done[1].is_vertical, "its prediction is of another kind, so it is what the first is compared with"


@settings(deadline=None)
@given(predictions, st.data())
def test_the_fastest_that_ran_is_taken(found: list[Prediction], data: st.DataObject) -> None:
    measurement = st.builds(Measurement, st.floats(0.01, 100), problem=st.sampled_from(["", "", "it died"]))
    rows = [CandidateRow(each, data.draw(st.none() | measurement)) for each in found]
    taken = best(rows)
    usable = [row for row in rows if not row.problem]
    ran = [row for row in usable if row.measurement is not None]
    assert (taken is None) == (not usable)
    if taken is not None:
        assert not taken.problem
        assert taken.seconds == min(row.seconds for row in ran) if ran else taken in usable


@given(st.floats(0.01, 50), st.floats(0.01, 500), st.integers(1, 2), st.integers(1, 64), st.floats(0.1, 100))
def test_a_run_has_as_many_micro_batches_as_there_is_time_for(
    least_s: float, more_s: float, least: int, count: int, room_s: float
) -> None:
    whole_s = least_s + more_s
    found = micro_batches_to_run(least_s, whole_s, least, count, room_s)
    assert min(least, count) <= found <= count
    if found > least and whole_s > room_s:
        assert least_s + (found - least) * more_s / (count - least) <= room_s * (1 + 1e-9)


def test_what_is_written_says_the_same_batch_and_keeps_the_rest() -> None:
    base = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "autotuning": {"enabled": True, "max_train_batch_size": None, "fast": False},
    }
    prediction = Prediction(Candidate(2, 4, order=VERTICAL), 1024, host_budget_bytes=1 << 30, seconds=1.0)
    told = settings_of(base, replace(prediction, candidate=Candidate(2, 4)), ranks=2)
    assert parse_config(told, world_size=2).train_batch_size == 16
    told = settings_of(base, prediction, ranks=1)
    config = parse_config(json.loads(json.dumps(told)))
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert sizes == (8, 2, 4)
    assert config.accumulation_order is VERTICAL and config.host_budget == 1 << 30
    assert config.precision is Precision.BF16 and config.scheduler is not None
    assert "autotuning" not in told and told["zero_optimization"] == base["zero_optimization"]
    durable = {"durability": {"every": 2, "path": "/mnt/durable"}}
    run = parse_config(settings_to_run({**base, **durable}, prediction, 1))
    assert run.durability is None and run.nvme_path == ("/mnt/durable",), "the disk that was planned with"
    run = parse_config(settings_to_run(base, prediction, 1))
    assert run.scheduler is None and run.train_batch_size == 2 and run.accumulation_order is HORIZONTAL
    assert run.optimizer is not None


class Runs:
    """Stands for the processes. ``dying``: runs that die, by their number."""

    def __init__(self, seconds: float = 1.0, dying: tuple[int, ...] = ()) -> None:
        self.tasks: list[dict[str, Any]] = []
        self._seconds, self._dying = seconds, dying

    def __call__(self, task: dict[str, Any], steps: int, limit_s: float, progress: Any) -> StepsRun:
        self.tasks.append(task)
        number = len(self.tasks)
        if number in self._dying:
            return StepsRun([], 1, "BudgetError: too small")
        return StepsRun([self._seconds / number] * steps, 1)


def tuner(run: Any, batch: int = 8, memory: int = 4 << 30, runs: int = 2) -> Tuner:
    machine = replace(MACHINE, host_memory_bytes=memory, nvme_bytes=0)
    model = CostModel(FORM, machine, Config(precision=Precision.BF16))
    choices = Choices(batch, micro_batches(batch), checkpointing=(False,), orders=(HORIZONTAL,))
    return Tuner(model, choices, {"precision": "bf16"}, AutotuningConfig(), runs, timed=0, run=run)


class Known(CostModel):
    """Says that large micro-batches are fast."""

    def predict(self, candidate: Candidate) -> Prediction:
        return Prediction(candidate, 256, 1 << 20, seconds=8 / candidate.micro_batch)


def with_known(run: Any) -> Tuner:
    made = tuner(run)
    return replace(made, model=Known(FORM, MACHINE, Config()))


def test_one_that_dies_is_reported_and_the_next_one_runs() -> None:
    run = Runs(dying=(1,))
    rows = with_known(run).rows()
    ran = [row for row in rows if row.measurement is not None]
    assert len(run.tasks) == 3 and [bool(row.problem) for row in ran].count(True) == 1
    taken = best(rows)
    assert taken is not None and taken.measurement is not None and not taken.problem
    assert taken.measurement.seconds == min(row.seconds for row in ran if not row.problem)
    every = Runs(dying=(1, 2, 3, 4))
    rows = with_known(every).rows()
    assert len(every.tasks) == 4, "twice as many as are asked for are tried"
    dead = [row for row in rows if row.problem]
    taken = best(rows)
    assert len(dead) == 4 and taken is not None and taken not in dead
    with pytest.raises(KeyboardInterrupt):
        with_known(_interrupted).rows()


def _interrupted(*_: object) -> StepsRun:
    raise KeyboardInterrupt


def test_a_run_that_was_ended_early_counts_by_its_last_steps() -> None:
    (candidate,) = Choices(2, (2,), (False,), (False,), (HORIZONTAL,)).candidates()
    prediction = Prediction(candidate, 64, 1 << 20, seconds=8.0)
    for done, expected in (([9.0, 5.0], 5.0), ([9.0, 5.0, 4.0], 4.0), ([9.0, 5.0, 4.0, 2.0, 3.0], 3.0)):
        made = with_known(lambda *_, steps=done: StepsRun(steps, 1))
        found = made.measure(prediction, 1)
        assert not found.problem and found.seconds == expected and found.steps == max(1, len(done) - 2)


def test_less_memory_leads_to_settings_that_need_less() -> None:
    """With little memory the candidates that keep the logits and activations of large micro-batches are out."""
    plenty = tuner(Runs(), batch=4, runs=0).rows()
    assert not any(row.problem for row in plenty)
    peaks = sorted(row.prediction.peak_bytes for row in plenty)
    memory = peaks[len(peaks) // 2]
    little = tuner(Runs(), batch=4, memory=memory, runs=0).rows()
    usable = [row.prediction for row in little if not row.problem]
    assert 0 < len(usable) < len(plenty) and all(each.peak_bytes <= memory for each in usable)
    by = {row.prediction.candidate: row.prediction for row in plenty}
    assert all(by[row.prediction.candidate].peak_bytes > memory for row in little if row.problem)
    short = min(row.prediction.least_memory_bytes for row in little if row.problem)
    again = tuner(Runs(), batch=4, memory=short, runs=0).rows()
    assert len(usable) < sum(not row.problem for row in again), "what is said to be enough is"
    assert len(little) == len(plenty) and {each.tokens for each in usable} == {4 * 32}


def test_a_tiny_model_really_runs(tmp_path: Path) -> None:
    """In a separate process, with paging: some of the model is on disk."""
    said = AutotuningConfig(start_profile_step=2, end_profile_step=3)
    machine = replace(MACHINE, process_bytes=200 << 20)
    base = {"precision": "bf16", "nvme_path": str(tmp_path), "host_budget": "600KiB"}
    model = CostModel(FORM, machine, parse_config(base))
    choices = Choices(4, (2,), checkpointing=(True,), tiled_loss=(True,))
    rows = Tuner(model, choices, base, said, runs=1).rows()
    assert len(rows) == 2 and all(row.prediction.measured_operators for row in rows), "both orders"
    (row,) = (row for row in rows if row.measurement is not None)
    assert not row.problem, row.problem
    assert row.measurement is not None and row.measurement.seconds > 0 and row.measurement.steps == 2
    assert row.measurement.peak_bytes > 50 << 20 and row.prediction.nvme_bytes > 0
    assert not list(tmp_path.iterdir()), "nothing is left on disk"


def test_a_process_that_takes_too_long_or_dies_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "PROGRAM", "no_such_program")
    with monkeypatch.context() as soon:
        soon.setattr(measured, "SAMPLE_S", 0.0)  # nothing ends in that
        assert "ended after 0 s, with 0 of 3 steps" in run_steps({}, 3, 0.0).problem
    run = run_steps({}, 3, 60.0)
    assert "status 1" in run.problem and "no_such_program" in run.problem and run.seconds == []
    with pytest.raises(BudgetError):
        task = {"config": {"host_budget": 1}, "micro_batch": 1, "checkpointing": False, "tiled_loss": False, "steps": 1}
        list(step_seconds({"model": FORM.as_json(), **task}))


def _file(folder: Path, said: dict[str, Any], name: str = "ds.json") -> str:
    (folder / name).write_text(json.dumps(said))
    return str(folder / name)


@pytest.fixture
def machine_file(tmp_path: Path) -> str:
    return _file(tmp_path, {"host_memory_bytes": "2 GiB", "nvme_bytes": "10GB"}, "machine.json")


def test_the_command_prints_a_configuration_and_writes_results(tmp_path: Path, machine_file: str, capsys: Any) -> None:
    results = tmp_path / "results"
    tuning = {"enabled": True, "results_dir": str(results), "overwrite": False, "num_tuning_micro_batch_sizes": 1}
    file = _file(tmp_path, {"train_batch_size": 8, "bf16": {"enabled": True}, "autotuning": tuning})
    command = ["--tune", file, *SIZES, "--machine", machine_file]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "->" in text and "chosen by throughput" in text and "predicted, not run" in text
    written = json.loads((results / "ds_config_optimal.json").read_text())
    assert json.dumps(written, indent=2) in text and written["train_batch_size"] == 8
    report = json.loads((results / "candidates.json").read_text())
    assert {each["micro_batch"] for each in report["candidates"]} == {8}
    assert report["settings"] == written and sorted(each.name for each in results.iterdir()) == [
        "candidates.json",
        "ds_config_optimal.json",
    ]
    assert main(command) == 2 and "overwrite is false" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 500, "intermediate_size": 128, "max_position_embeddings": 64}
    _file(tmp_path / "model", sizes, "config.json")
    command = ["--tune", str(tmp_path / "model"), "--machine", machine_file, "--train-batch-size", "1", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["train_batch_size"] == 1 and found["settings"]["precision"] == "bf16"
    assert {each["tiled_loss"] for each in found["candidates"]} == {False, True}
    assert {each["checkpointing"] for each in found["candidates"]} == {False, True}
    assert all(not each["predicted"]["problem"] for each in found["candidates"])


OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Own(nn.Module):
    def __init__(self, checkpointing):
        super().__init__()
        self.table, self.checkpointing = nn.Embedding(500, 64), checkpointing
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.head = nn.Linear(64, 500)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x))
        return self.head(x)

def make(micro_batch, seq, checkpointing=False):
    def loss(call):
        tokens = torch.randint(500, (micro_batch, seq))
        return F.cross_entropy(call(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return Own(checkpointing), loss

def alone(micro_batch):
    return Own(False)

def bare():
    return None

def fails(micro_batch):
    raise RuntimeError("no data")
"""


def test_a_model_of_the_program(tmp_path: Path, machine_file: str, capsys: Any) -> None:
    """Its function says by its arguments what can be varied."""
    (tmp_path / "own_program.py").write_text(OWN)
    place = f"{tmp_path}/own_program.py"
    file = _file(tmp_path, {"train_batch_size": 2, "autotuning": {"num_tuning_micro_batch_sizes": 1}})
    command = ["--tune", file, "--machine", machine_file, "--seq", "32", "--json", "--model"]
    assert main([*command, f"{place}:make"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "Own, 32 tokens per sequence"
    assert any("has no argument tiled_loss" in note for note in found["notes"])
    assert {(each["checkpointing"], each["tiled_loss"]) for each in found["candidates"]} == {
        (False, False),
        (True, False),
    }
    task = {"config": settings_to_run({}, Prediction(Candidate(1, 1, True, False), 32, 8 << 20), 1), "steps": 2}
    form = ModelForm(32, function=f"{place}:make").as_json()
    seconds = step_seconds({"model": form, "micro_batch": 1, "checkpointing": True, "tiled_loss": False, **task})
    assert len(list(seconds)) == 2
    for name, message in (
        (f"{place}:none", "has no function none"),
        (place, "expected FILE.py:FUNCTION"),
        (f"{tmp_path}/no.py:make", "importing .* fails: FileNotFoundError"),
        (f"{place}:alone", "gave a Own; expected a model and a function"),
        (f"{place}:bare", "needs an argument micro_batch"),
        (f"{place}:fails", "fails: RuntimeError: no data"),
    ):
        assert main([*command, name]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert main([*SIZES, "--machine", machine_file, "--model", f"{place}:make"]) == 2
    assert "are different ways to say the model" in capsys.readouterr().err


def test_what_a_file_leaves_open_or_misspells_is_told(tmp_path: Path, machine_file: str, capsys: Any) -> None:
    """Such a file is a trainer's: nobody fills it in here, and the model is tuned as it is registered."""
    said = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "gradient_cliping": 1.0}
    file = _file(tmp_path, {**said, "autotuning": {"enabled": True, "num_tuning_micro_batch_sizes": 1}})
    command = ["--tune", file, *SIZES, "--machine", machine_file, "--train-batch-size", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "gradient_cliping: unknown key" in text and "bf16.enabled became precision = 'keep'" in text
    assert "train_batch_size became" not in text and "nothing is tuned" not in text
    assert main([*command, "--memory", "50MiB"]) == 1, "less than the process itself takes"
    text = capsys.readouterr().out
    assert "None of them can be used." in text
    (memory,) = re.findall(r"With (.*) of memory this one fits: ", text)
    assert main([*command, "--memory", memory.replace(" ", "")]) == 0 and "chosen by" in capsys.readouterr().out


def test_an_interrupted_command_writes_nothing(
    tmp_path: Path, machine_file: str, capsys: Any, monkeypatch: Any
) -> None:
    results = tmp_path / "results"
    file = _file(tmp_path, {"train_batch_size": 1, "autotuning": {"results_dir": str(results)}})
    monkeypatch.setattr(Tuner, "rows", _interrupted)
    assert main(["--tune", file, *SIZES, "--machine", machine_file]) == 130
    assert "nothing was written" in capsys.readouterr().err and not list(results.iterdir())


@pytest.mark.parametrize(
    ("said", "more", "message"),
    [
        ({}, [], "the batch of a step, so it has to be known"),
        ({"train_batch_size": "auto"}, [], "the batch of a step, so it has to be known"),
        ({"train_batch_size": 8, "autotuning": {"max_train_batch_size": 4}}, [], "allows from 1 to 4"),
        ({"train_batch_size": 8, "autotuning": {"min_train_batch_size": 9}}, [], "allows from 9"),
        (
            {"train_batch_size": 10**15, "autotuning": {"max_train_micro_batch_size_per_gpu": 64}},
            [],
            "in at most 512 micro-batches",
        ),
        ({"train_batch_size": 6, "autotuning": {"min_train_micro_batch_size_per_gpu": 7}}, [], "no micro-batch from 7"),
        ({"train_batch_size": 8, "autotuning": {"end_profile_step": 2}}, [], "no step would be timed"),
        ({"train_batch_size": 8, "autotuning": {"metric": "beauty"}}, [], "autotuning.metric"),
        ({"train_batch_size": 8, "autotuning": {"results_dir": "/proc/no"}}, [], "autotuning.results_dir /proc/no"),
        ({"train_batch_size": 8, "autotuning": {"results_dir": "/proc"}}, [], "autotuning.results_dir /proc"),
        ({"train_batch_size": 8, "inference": True}, [], "nothing to tune"),
        ({"train_batch_size": 8}, ["--batch", "4"], "--batch is what --tune chooses"),
        ({"train_batch_size": 8}, ["--precision", "fp32"], "--precision"),
        ({"train_batch_size": 8}, ["--order", "vertical"], "--order is what --tune chooses"),
        ({"train_batch_size": 8, "zero_optimisation": {}}, ["--inference"], "--inference is what --tune chooses"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    tmp_path: Path, machine_file: str, capsys: Any, said: dict[str, Any], more: list[str], message: str
) -> None:
    file = _file(tmp_path, said)
    assert main(["--tune", file, *SIZES, "--machine", machine_file, *more]) == 2
    assert message in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path: Path, machine_file: str, capsys: Any) -> None:
    file = _file(tmp_path, {"train_batch_size": 1})
    for command, message in (
        (["--tune", file, "--machine", machine_file], "say the model, too"),
        (["--tune", str(tmp_path / "no.json"), *SIZES], "cannot be read"),
        (["--memory", "1GiB", *SIZES, "--machine", machine_file], "--memory is for --tune"),
        (["--tune", file, *SIZES, "--ranks", "2"], "--tune runs one process, not 2"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert main(["--tune", file, *SIZES, "--machine", machine_file, "--memory", "20MiB"]) == 1
    assert "None of them can be used." in capsys.readouterr().out


def test_a_program_that_trains_is_told_once_that_nothing_is_tuned(tmp_path: Path) -> None:
    file = _file(tmp_path, {"autotuning": {"enabled": True, "exps_dir": "somewhere", "new_in_1.0": 1}})
    config = parse_config(file)
    tuned = [warning for warning in config.warnings if "--tune" in warning]
    assert len(tuned) == 1 and f"python -m deepoffload.estimate --tune {file} --config MODEL" in tuned[0]
    assert parse_config(config).warnings == config.warnings
    assert any("exps_dir" in note for note in config.notes) and any("new_in_1.0" in each for each in config.warnings)
    assert not parse_config({"autotuning": {"enabled": False, "fast": True}}).warnings
