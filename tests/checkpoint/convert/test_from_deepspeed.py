"""DeepSpeed's own files (made by tests/support/deepspeed_peer.py), read without DeepSpeed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.checkpoint.convert.commands import run as command
from deepoffload.checkpoint.convert.deepspeed_files import bookkeeping
from deepoffload.checkpoint.convert.pickle_reader import Name, Record
from deepoffload.checkpoint.convert.tensors import Values, pieces_of
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.universal import read_universal, write_universal
from deepoffload.checkpoint.convert.zero import read_zero
from deepoffload.errors import UnsupportedError, UsageError
from tests.checkpoint.damaged import inert
from tests.support.deepspeed_peer import ARRAYS, FIXTURES, STEPS, PeerModel, configuration, param_groups, tokens_of

UNIVERSAL = [name for name, (*_, universal) in FIXTURES.items() if universal]
LOSS_TOLERANCES = {"bf16": 2e-3, "fp32": 1e-5}
"""Relative: activations are rounded, and ranks each take the mean of their part of the batch."""
LOSS_TOLERANCE = LOSS_TOLERANCES["bf16"]


def whole(values: Values) -> Tensor:
    return torch.cat([torch.empty(0, dtype=values.dtype), *pieces_of(values)]).view(values.shape)


def expected_of(place: Path) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = torch.load(place / "expected.pt", weights_only=True)
    return found


def check(run: TrainingRun, place: Path) -> None:
    """Weights and moments are those that DeepSpeed's converter gives, and the rest is what was trained."""
    expected = expected_of(place)
    plain = PeerModel()
    names = dict(plain.named_parameters())
    assert set(run.trained()) == set(expected) == {name for name in names if names[name].requires_grad}
    for name, held in expected.items():
        assert run.weights[name].shape == tuple(names[name].shape)
        assert torch.equal(whole(run.exact(name)).view(-1), held["fp32"].view(-1)), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(run.arrays[name][key]).view(-1), held[key].view(-1)), (name, key)
        assert run.small[name]["step"] == STEPS
    frozen = {name: param for name, param in names.items() if not param.requires_grad}
    for name, tensor in {**frozen, "scale": plain.scale}.items():
        found = whole(run.weights[name])
        assert torch.equal(found, tensor.to(found.dtype)), name
    assert run.aliases == {"head.weight": "embed.weight"}
    assert set(run.weights) == plain.state_dict().keys() - {"head.weight"}
    assert run.step == STEPS
    assert run.kind == "adam"
    assert [group.settings["weight_decay"] for group in run.groups] == [0.1, 0.0]
    assert all(group.settings["betas"] == (0.9, 0.95) and group.settings["eps"] == 1e-6 for group in run.groups)
    assert [set(group.names) for group in run.groups] == [
        {name for name in expected if names[name].dim() > 1},
        {name for name in expected if names[name].dim() < 2},
    ]
    assert run.client_state["epoch"] == 2
    assert run.client_state["note"] == "hello"
    assert torch.equal(run.client_state["seen"], torch.arange(3))
    assert run.others["scheduler"]["last_epoch"] == STEPS


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_the_one_that_deepspeed_has(name: str, fixtures: Path) -> None:
    run = read_zero(str(fixtures / name))
    check(run, fixtures / name)
    stage, ranks, _, _ = FIXTURES[name]
    assert f"ZeRO-{stage}, {ranks} rank" in run.source


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_checkpoints_have_the_same(name: str, fixtures: Path) -> None:
    check(read_universal(str(fixtures / name)), fixtures / name)


@pytest.mark.parametrize("name", UNIVERSAL)
def test_what_we_write_as_universal_reads_back(name: str, fixtures: Path, tmp_path: Path) -> None:
    tag = write_universal(read_zero(str(fixtures / name)), str(tmp_path / "out"), None, lambda nbytes: None)
    check(read_universal(str(tmp_path / "out")), fixtures / name)
    folder = tmp_path / "out" / tag
    for file in folder.rglob("*.pt"):
        torch.load(file, weights_only=True)
    held = torch.load(folder / "zero" / "up.weight" / "exp_avg.pt", weights_only=True, mmap=True)
    assert torch.equal(held["param"].view(-1), expected_of(fixtures / name)["up.weight"]["exp_avg"].view(-1))


@pytest.mark.parametrize("lost", [("exp_avg",), ("exp_avg", "exp_avg_sq")], ids=str)
def test_a_universal_checkpoint_that_has_lost_files(lost: tuple[str, ...], fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tag = write_universal(read_zero(str(fixtures / UNIVERSAL[0])), str(out), None, lambda nbytes: None)
    for key in lost:
        (out / tag / "zero" / "up.weight" / f"{key}.pt").unlink()
    with pytest.raises(UsageError, match=rf"up.weight has no {', '.join(f'{key}.pt' for key in lost)}, which other"):
        read_universal(str(out))


@pytest.mark.parametrize("name, ours", [("zero2", False), ("zero3", False), ("zero2", True)])
def test_each_file_of_a_universal_checkpoint_is_missed(
    name: str, ours: bool, fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any one of its files the conversion says which, or gives the same tensors, counters and settings."""
    place = tmp_path / "universal"
    if ours:
        write_universal(read_zero(str(fixtures / name)), str(place), None, lambda nbytes: None)
    else:
        shutil.copytree(fixtures / name, place)
    tag = (place / "latest_universal").read_text().strip()
    missed = set()
    for file in [file for file in sorted((place / tag).rglob("*")) if file.is_file()]:
        content = file.read_bytes()
        file.unlink()
        if command(["from-universal", str(place), str(tmp_path / "out")]) == 0:
            check(read_universal(str(place)), fixtures / name)
        else:
            missed.add(file.name)
        file.write_bytes(content)
    assert "is not complete" in capsys.readouterr().err
    assert missed >= {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "optimizer_state.pt"}
    assert ("mp_rank_00_model_states.pt" in missed) is (name == "zero2")
    assert ("step.pt" in missed) is (name == "zero2" and not ours)


def test_a_universal_checkpoint_without_any_step(fixtures: Path, tmp_path: Path) -> None:
    place = tmp_path / "universal"
    shutil.copytree(fixtures / "zero2", place)
    for file in place.rglob("step.pt"):
        file.unlink()
    with pytest.raises(UsageError, match="and not the number of its steps"):
        read_universal(str(place))
    file = next(place.rglob("optimizer_state.pt"))
    state = torch.load(file, weights_only=False, pickle_module=inert())
    for group in state["param_groups"]:  # as DeepSpeed's FusedAdam counts
        group["step"] = STEPS
    torch.save(state, file)
    check(read_universal(str(place)), fixtures / "zero2")


def test_a_model_file_without_the_number_of_steps() -> None:
    with pytest.raises(UsageError, match="no global_steps"):
        bookkeeping({"ds_config": {}}, "a file", None)


def losses_of(model: nn.Module, optimizer: Any, first: int) -> list[float]:
    found = []
    for step in range(first, first + STEPS):
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_state(model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, dict[str, Tensor]]) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = optimizer.state_dict()["state"]
    for number, param in enumerate(params):
        held = expected[names[id(param)]]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[number][key].reshape(-1), held[key].view(-1)), (names[id(param)], key)
        assert int(state[number]["step"]) == STEPS
        weight = param.detach().reshape(-1)
        assert torch.equal(weight, held["fp32"].view(-1).to(weight.dtype)), names[id(param)]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_run_continues_from_deepspeeds_files(
    name: str, fixtures: Path, tmp_path: Path, paged: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["from-deepspeed", str(fixtures / name), str(tmp_path / "out")]) == 0
    assert f"step {STEPS}" in capsys.readouterr().out
    assert command(["verify", str(tmp_path / "out")]) == 0
    precision = FIXTURES[name][2]
    model = paged(PeerModel, precision=precision)
    optimizer = deepoffload.CPUAdamW(param_groups(model), lr=1.0, max_grad_norm=1.0)
    loaded = deepoffload.TrainingState(model, optimizer).load(tmp_path / "out")
    assert loaded.step == STEPS
    assert loaded.client_state["note"] == "hello"
    assert_state(model, optimizer, expected_of(fixtures / name))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    theirs = json.loads((fixtures / name / "losses.json").read_text())["next"]
    ours = losses_of(model, optimizer, STEPS)
    assert ours[0] == pytest.approx(theirs[0], rel=LOSS_TOLERANCES[precision])


@pytest.mark.parametrize("name", UNIVERSAL)
def test_load_universal_is_honoured(name: str, fixtures: Path, nvme_path: Path) -> None:
    config = {
        **configuration(2, 1, "bf16", universal=True),
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-6}},
        "host_budget": "1MiB",
        "nvme_path": str(nvme_path),
    }
    model = PeerModel()
    engine, optimizer, _, scheduler = deepoffload.initialize(
        model=model, model_parameters=param_groups(model), config=config
    )
    folder, client = engine.load_checkpoint(fixtures / name)
    assert folder == str(fixtures / name / f"global_step{STEPS}_universal")
    assert client["note"] == "hello"
    assert engine.global_steps == STEPS
    assert_state(model, optimizer, expected_of(fixtures / name))
    assert scheduler.last_epoch == STEPS
    theirs = json.loads((fixtures / name / "losses.json").read_text())["next"]
    losses = []
    for step in range(STEPS, 2 * STEPS):
        loss = engine(tokens_of(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(theirs, rel=LOSS_TOLERANCE)
    with pytest.raises(UsageError, match="latest_universal"):
        engine.load_checkpoint(fixtures / "zero1")
    engine.close()


def test_a_schedule_of_another_kind_is_refused_by_name(fixtures: Path, tmp_path: Path) -> None:
    assert command(["from-deepspeed", str(fixtures / "zero1"), str(tmp_path / "out")]) == 0
    model = PeerModel()
    optimizer = deepoffload.CPUAdamW(param_groups(model), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    state = deepoffload.TrainingState(model, optimizer, scheduler=schedule)
    with pytest.raises(UsageError, match="scheduler .LambdaLR. .* load_lr_scheduler_states=False"):
        state.load(tmp_path / "out")
    assert state.load(tmp_path / "out", load_lr_scheduler_states=False).step == STEPS
    assert schedule.last_epoch == 0


def test_a_dynamic_loss_scale_is_taken_over() -> None:
    """DeepSpeed pickles its scaler as an object; it has no fp16 on a CPU, so no file of it is here."""
    state = {"cur_scale": 4096.0, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1, "dynamic": True}
    scaler = Record(Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), ())
    scaler.state = state
    found = bookkeeping({"global_steps": 7, "ds_config": {"gradient_accumulation_steps": 4}}, "a file", scaler)
    assert found.others["loop"]["loss_scale"] == {"value": 4096.0, "left": 1, "steps": 7, "last_overflow": 5}
    assert found.others["loop"]["micro_steps"] == 28


def test_other_layouts_are_refused_by_name(fixtures: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="optim_states"):
        read_zero(str(tmp_path))
    with pytest.raises(UsageError, match="from-deepspeed"):
        read_universal(str(fixtures / "zero1"), f"global_step{STEPS}")
    folder = fixtures / "zero2" / f"global_step{STEPS}"
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in sorted(folder.iterdir()):
        if "rank_1" not in file.name:
            (copied / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="lacks optimizer files"):
        read_zero(str(copied))
    (copied / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        read_zero(str(copied))
    one = tmp_path / "one"
    one.mkdir()
    for file in sorted((fixtures / "zero3" / f"global_step{STEPS}").iterdir()):
        if "rank_1_" not in file.name:
            (one / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="of 2 ranks, and there are files of 1"):
        read_zero(str(one))
    assert set(ARRAYS) == {"fp32", "exp_avg", "exp_avg_sq"}
