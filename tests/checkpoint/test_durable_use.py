"""Durable steps in use: resuming under other settings, engines, what is refused."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.convert.commands import run as show
from deepoffload.checkpoint.durable_list import DurableFile, durable_states
from deepoffload.errors import BudgetError, ConfigError, IoFailure, PlacementError, UnsupportedError, UsageError
from deepoffload.native.aio import PAGE_BYTES
from tests.checkpoint.durable_model import PLACES, Make, Run, trained
from tests.support.disks import folder_on_disk, largest_file
from tests.support.loops import assert_same_bits
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import TIGHT, Paging


@pytest.mark.parametrize("place", PLACES)
def test_another_budget_takes_it_over(place: str, make: Make) -> None:
    expected = trained(make, precision="bf16")
    run = make(place, precision="bf16", step_overlap="none")
    assert run.state.resume() == 2
    assert_same_bits(expected, run.everything())
    run.step()
    run.state.commit(wait=True)


@pytest.mark.parametrize("optimizer", [{"state_dtype": "8bit"}, {"state_dtype": "bf16"}, {"amsgrad": True}])
def test_other_formats_of_state(optimizer: dict[str, Any], tmp_path: Path) -> None:
    folder_on_disk(tmp_path / "swap")
    ends = []
    for resumes in (False, True):
        if resumes:
            shutil.rmtree(tmp_path / "swap")
            (tmp_path / "swap").mkdir()
        run = None
        for step in range(6):
            if run is None or (resumes and step == 3):
                if run is not None:
                    run.close()
                torch.manual_seed(0)
                run = Settings(tmp_path / "swap", optimizer)
                assert run.state.resume() == (step if resumes else 0)
            run.step()
            run.state.commit()
        ends.append(run.everything())
        run.state.discard()
        run.close()
        assert os.listdir(tmp_path / "swap") == []
    assert_same_bits(*ends)


class Settings(Run):
    """A run whose optimizer has other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__(**PLACES["half"], precision="bf16", durability={"every": 1, "path": str(path)})
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2, **settings)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        del self.state
        self.state = deepoffload.TrainingState(self.model, self.optimizer, schedule=self.schedule)
        torch.manual_seed(1)


def test_an_optimizer_of_torchs_own(tmp_path: Path) -> None:
    """It changes weights through the doors, and keeps its state in memory."""
    losses = []
    for path, kill in ((tmp_path / "one", None), (tmp_path / "two", 3)):
        folder_on_disk(path)
        mine: list[float] = []
        for _ in range(2):
            torch.manual_seed(0)
            said = {"every": 1, "path": str(path)}
            with deepoffload.offload_context(host_budget="400KiB", durability=said) as context:
                model = TinyGPT(width=32, depth=3)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            state = deepoffload.TrainingState(model, optimizer)
            torch.manual_seed(1)
            for step in range(state.resume(), 6 if mine or kill is None else kill):
                loss = next_token_loss(model, batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mine.append(float(loss.detach()))
                state.commit()
            context.engine.close()
            del state
        losses.append(mine)
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_an_engine_commits_each_update_and_resumes(tmp_path: Path) -> None:
    config = {
        "host_budget": "400KiB",
        "durability": {"every": 1, "path": str(tmp_path)},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }

    def run(last: int) -> list[float]:
        torch.manual_seed(0)
        engine, *_ = deepoffload.initialize(model=TinyGPT(width=32, depth=3), config=config)
        torch.manual_seed(1)
        losses = []
        assert engine.resume() == engine.global_steps
        for micro in range(engine.micro_steps, last):
            loss = next_token_loss(engine, batch(micro))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.close()
        return losses

    losses = [*run(6), *run(12)]
    assert len(losses) == 12
    torch.manual_seed(0)
    engine, *_ = deepoffload.initialize(model=TinyGPT(width=32, depth=3), config=config)
    engine.discard()
    torch.manual_seed(1)
    assert engine.resume() == engine.global_steps == 0
    engine.close()
    assert losses == run(12)


def test_client_state_and_the_list_of_states(make: Make, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    assert durable_states(swap) == []
    run = make()
    run.step()
    run.state.commit(wait=True, client_state={"epoch": 3, "seen": torch.arange(5)})
    (found,) = durable_states(swap)
    assert found.usable and "durable step 1, " in found.text and f"in use by process {os.getpid()}" in found.text
    with pytest.raises(UsageError, match=f"is used by process {os.getpid()}"):
        make()
    run.close()
    assert "last used by process" in durable_states(swap)[0].text
    run = make()
    assert run.state.resume() == 1
    assert run.state.client_state["epoch"] == 3 and torch.equal(run.state.client_state["seen"], torch.arange(5))
    run.state.discard()
    (found,) = durable_states(swap)
    assert found.usable and "no durable step" in found.text
    run.close()
    assert durable_states(swap) == [] == os.listdir(swap)


def test_what_is_no_file_is_listed_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "deepoffload-rank0.durable")
    os.symlink("/etc/passwd", tmp_path / "deepoffload-rank1.durable")
    (tmp_path / "deepoffload-rank2.durable").mkdir()
    expected = [DurableFile(f"deepoffload-rank{rank}.durable", "no ordinary file", usable=False) for rank in range(3)]
    assert durable_states(tmp_path) == expected


def test_a_durable_state_that_cannot_be_used_ends_show_with_1(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap = tmp_path / "swap"
    run = make()
    run.step()
    run.state.commit(wait=True)
    run.close()
    assert show(["show", str(swap)]) == 0
    assert "durable step 1, " in capsys.readouterr().out
    file = swap / "deepoffload-rank0.durable"
    content = bytearray(file.read_bytes())
    content[2 * PAGE_BYTES : 4 * PAGE_BYTES] = b"\1" * (2 * PAGE_BYTES)
    file.write_bytes(content)
    for why in ("both records of the durable state are damaged", "it was cut off"):
        assert show(["show", str(swap)]) == 1
        said = capsys.readouterr()
        assert f"{file.name}: cannot be used: " in said.out and why in said.out
        assert f"1 of 1 cannot be used: {file.name}" in said.err
        file.write_bytes(content[: 2 * PAGE_BYTES])


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["durability.path", "nvme_path"])
def test_errors_and_warnings_name_the_key_that_says_where(key: str, tmp_path: Path) -> None:
    def build(place: Path) -> None:
        path = str(place)
        said = {"durability": {"path": path}} if key == "durability.path" else {"durability": True, "nvme_path": path}
        with deepoffload.offload_context(host_budget="400KiB", **said):
            nn.Linear(256, 256)

    with pytest.raises(ConfigError, match=f"^{key}: {tmp_path}/nowhere does not exist"):
        build(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^{key}: {tmp_path}/file is not a directory"):
        build(tmp_path / "file")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with largest_file(1 << 20), pytest.warns(RuntimeWarning, match=f"^{key}: {shared} can be written to by everybody"):
        with pytest.raises((BudgetError, IoFailure), match=rf"{key}: {shared}: \d+ more bytes cannot be allocated"):
            build(shared)


def test_commits_that_are_refused(make: Make, paging: Paging) -> None:
    run = make()
    with pytest.raises(UsageError, match="commit without a step: call optimizer.step"):
        run.state.commit()
    run.model(torch.randn(4, 96)).sum().backward()
    with pytest.raises(UsageError, match="commit between backward and step"):
        run.state.commit()
    run.optimizer.step()
    with pytest.raises(UnsupportedError, match=r"commit\['client_state'\] is of type object"):
        run.state.commit(client_state=object())
    run.state.commit()
    with pytest.raises(UsageError, match="commit without a step"):
        run.state.commit()
    with pytest.raises(UsageError, match="this run itself has committed step 1.*before the first step"):
        run.state.resume()
    run.state.commit(wait=True)
    run.state.commit(wait=True)
    with pytest.raises(UsageError, match="step 1 is committed already, and what it keeps of client_state stays"):
        run.state.commit(wait=True, client_state={"epoch": 1})
    with pytest.raises(UsageError, match="this run itself has committed step 1"):
        run.state.resume()
    run.state.discard()
    assert run.state.resume() == 0
    run.state.commit(wait=True, client_state={"epoch": 1})
    run.close()
    run = make()
    assert run.state.resume() == 1 and run.state.client_state == {"epoch": 1}
    model = paging.build(lambda: TinyGPT(width=32, depth=1), TIGHT)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    state = deepoffload.TrainingState(model, optimizer)
    for call in (state.commit, state.resume, state.discard):
        with pytest.raises(UsageError, match="this model has no durable state; build it with durability=True"):
            call()


def test_a_commit_that_is_refused_takes_nothing_of_the_one_before(make: Make) -> None:
    run = make()
    run.step()
    run.state.commit()
    run.model(torch.randn(4, 96)).sum().backward()
    with pytest.raises(UsageError, match="commit between backward and step"):
        run.state.commit()
    run.close()
    assert make().state.resume() == 1


def test_an_earlier_runs_state_is_not_replaced_unasked(make: Make) -> None:
    trained(make)
    run = make()
    run.step()
    with pytest.raises(
        UsageError, match=r"the durable state of an earlier run \(step 2\).*call resume\(\) first, or discard"
    ):
        run.state.commit()
    run.close()
    run = make()
    assert run.state.resume() == 2


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: nn.Linear(4, 4), deepoffload.CPUAdamW, "of another model: it lacks"),
        (lambda: TinyGPT(width=32, depth=3), deepoffload.CPUAdamW, "of another model"),
        (None, deepoffload.CPULion, "the state of another optimizer: adam, and this is CPULion"),
        (None, lambda params: deepoffload.CPUAdamW([{"params": [p]} for p in params]), "1 parameter groups"),
    ],
)
def test_another_model_or_optimizer(model: Any, optimizer: Any, message: str, tmp_path: Path) -> None:
    said = {"host_budget": "1MiB", "durability": {"every": 1, "path": str(tmp_path)}}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return TinyGPT(width=32, depth=2)

    with deepoffload.offload_context(**said) as context:
        first = build()
    mine = deepoffload.CPUAdamW(first.parameters())
    next_token_loss(first, batch(0)).backward()
    mine.step()
    state = deepoffload.TrainingState(first, mine)
    next_token_loss(first, batch(0)).backward()
    mine.step()
    state.commit(wait=True)
    context.engine.close()
    with deepoffload.offload_context(**said) as context:
        other = (model or build)()
    theirs = optimizer(other.parameters())
    before = {name: value.detach().clone() for name, value in other.named_parameters()}
    with pytest.raises(UsageError, match=message) as caught:
        deepoffload.TrainingState(other, theirs).resume()
    assert "begin in another durability.path" in str(caught.value) and "load_" not in str(caught.value)
    assert_same_bits(before, {name: value.detach().clone() for name, value in other.named_parameters()})
    context.engine.close()


def test_places_that_cannot_hold_it(tmp_path: Path) -> None:
    build = partial(TinyGPT, width=64, depth=3)
    with (
        pytest.raises(ConfigError, match="does not exist"),
        deepoffload.offload_context(durability={"path": str(tmp_path / "missing")}),
    ):
        build()
    with pytest.raises(ConfigError, match="is in memory"), deepoffload.offload_context(durability={"path": "/dev/shm"}):
        build()
    with pytest.raises(PlacementError, match="With durability NVMe must hold"):
        with deepoffload.offload_context(durability={"path": str(tmp_path)}, nvme_budget="4MiB"):
            model = build()
            assert isinstance(model, nn.Module)
    assert os.listdir(tmp_path) == []
