"""What happens to an optimizer of another package: clipping, freezing, disk errors, checkpoints, other optimizers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.engine import IoEngine
from deepoffload.optim.foreign import run_by_run
from deepoffload.runtime import disk as disk_module
from tests.checkpoint.durable_model import PLACES, Run
from tests.optim.deferred import backward, train_on_text
from tests.optim.deferred import build as small
from tests.optim.foreign_kinds import CountingAdam, PlainLoop
from tests.optim.test_foreign import shown, train
from tests.support.inspect import io_of, is_paged, units_of
from tests.support.loops import assert_same_bits, nudge, weights_of
from tests.support.models import TinyGPT, batch, gpt2, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, SERIAL, TIGHT, Paging, plain

ADAFACTOR = partial(deepoffload.paged, torch.optim.Adafactor, lr=0.05)
NADAM = partial(deepoffload.paged, torch.optim.NAdam, lr=0.01)
ADAMW = partial(deepoffload.paged, torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize("precision", ["keep", "bf16", "fp16"])
@pytest.mark.parametrize("make", [ADAFACTOR, NADAM], ids=["adafactor", "nadam"])
def test_whenever_the_update_runs(paging: Paging, make: Callable[..., Any], precision: str) -> None:
    """Clipped, accumulated, with a frozen layer that comes back, and a schedule."""
    outcomes = []
    for setting in (RESIDENT, SERIAL, TIGHT, EVICTING):
        model = paging.build(small, replace(setting, precision=precision), key="foreign")
        model[2].requires_grad_(False)
        optimizer = make(model.parameters(), max_grad_norm=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        losses = []
        for step in range(5):
            if step == 3:
                model[2].requires_grad_(True)
            losses += [backward(model, 10 * step), backward(model, 10 * step + 1)]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        outcomes.append((losses, weights_of(model), shown(optimizer)))
    for outcome in outcomes[1:]:
        assert_same_bits(outcomes[0], outcome)


def test_clipping_as_in_plain_pytorch(paging: Paging) -> None:
    model, twin = paging.build(small, TIGHT, key="foreign"), plain(small)
    optimizer = NADAM(model.parameters(), max_grad_norm=0.05)
    reference = PlainLoop(twin, lambda params: torch.optim.NAdam(params, lr=0.01))
    for step in range(4):
        assert_same_bits(backward(twin, step), backward(model, step))
        optimizer.step()
        assert optimizer.grad_norm is not None
        reference.step(min(1.0, 0.05 / (optimizer.grad_norm + 1e-6)))
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same_bits(weights_of(twin), weights_of(model))


@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_inside_backward(paging: Paging, precision: str) -> None:
    outcomes = []
    for overlap in ("none", "in_backward"):
        setting = replace(EVICTING, step_overlap=overlap, precision=precision)
        model = paging.build(small, setting, key="foreign")
        optimizer = ADAFACTOR(model.parameters())
        outcomes.append((train(model, optimizer, range(4)), weights_of(model), shown(optimizer)))
    assert_same_bits(*outcomes)


def test_a_parameter_larger_than_a_piece(paging: Paging) -> None:
    """Its state lies in separate pieces. They are stepped one after the other where elements are independent, and
    copied together where they are not."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512, bias=False), nn.GELU(), *mlp(512, depth=1), nn.Linear(512, 64))

    nadam = torch.optim.NAdam
    for made, precision in ((nadam, "keep"), (nadam, "bf16"), (CountingAdam, "bf16"), (nadam, "fp16")):
        outcomes = []
        for room in (None, 1.2):
            setting = replace(EVICTING, room=room, precision=precision, evict_always=room is not None)
            model = paging.build(build, setting, key="large")
            optimizer = deepoffload.paged(made, model.parameters(), lr=0.01)
            outcomes.append((train(model, optimizer, range(3)), weights_of(model), shown(optimizer)))
            spread = [len([p for p in unit.pieces if h in p.handles]) for unit in units_of(model) for h in unit.handles]
        assert max(spread) > 1, "every parameter lies in one piece: this tested nothing"
        if precision != "fp16":
            assert_same_bits(*outcomes)
        else:
            assert_same_bits(*outcomes, nan_is_wrong=False)


@pytest.mark.parametrize("made", [torch.optim.AdamW, CountingAdam])
def test_pieces_of_a_large_parameter_leave_memory_once_a_step(paging: Paging, made: Any) -> None:
    """They are read, and written when the class has stepped. Between the two nothing makes room of them. Where elements
    are independent, each is used once."""
    model = paging.build(
        lambda: mlp(512, depth=8),
        replace(EVICTING, room=3.0, evict_always=False, prefetch=True, step_overlap="none"),
        key="once",
    )
    optimizer = deepoffload.paged(made, model.parameters(), lr=0.01)
    seen = []
    for seed in range(4):
        model(rows(width=512, seed=seed)).square().mean().backward()
        before = deepoffload.stats(model)["evictions"]
        optimizer.step()
        seen.append(deepoffload.stats(model)["evictions"] - before)
        optimizer.zero_grad()
    blocks = sum(len(unit.pieces) + 1 for unit in units_of(model))
    assert 0 < min(seen[1:]) <= 1.4 * blocks, f"{seen} evictions in four steps, of {blocks} blocks"


@pytest.mark.parametrize(("overlap", "precision"), [("none", "keep"), ("deferred", "bf16")])
def test_again_after_a_disk_error(
    paging: Paging, monkeypatch: pytest.MonkeyPatch, overlap: str, precision: str
) -> None:
    monkeypatch.setattr(run_by_run, "RUN_NUMEL", 5000)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def build() -> nn.Module:
        return mlp(128, depth=3)

    def trained(retries: int = 0) -> tuple[Any, list[int], int]:
        model = paging.build(build, replace(SERIAL, step_overlap=overlap, precision=precision), key="failing")
        optimizer = ADAMW(model.parameters())
        io, seen, failed = io_of(model), [], 0
        for seed in range(3):
            seen.append(io.stats()["chunks_done"])
            for call in (
                lambda s=seed: model(rows(width=128, seed=s).to(dtype)).square().mean().backward(),
                optimizer.step,
            ):
                while True:
                    try:
                        call()
                        break
                    except IoFailure:
                        failed += 1
                        assert failed <= retries
                        if call is not optimizer.step:
                            optimizer.zero_grad()
            optimizer.zero_grad()
        seen.append(io.stats()["chunks_done"])
        assert io.stats()["requests_failed"] == retries, "nothing has failed: this tested nothing"
        return (weights_of(model), shown(optimizer)), seen, failed

    expected, seen, _ = trained()
    raised = 0
    for place in range(seen[2] + 1, seen[3], max(1, (seen[3] - seen[2]) // 6)):
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={place} errno={errno.EIO}"))
            got, _, failed = trained(retries=1)
        assert_same_bits(expected, got)
        raised += failed
    assert raised or overlap == "deferred", "no call has failed"  # what is read ahead is read again without a word


def gpt() -> nn.Module:
    return TinyGPT(width=32, depth=2)


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("make", [ADAFACTOR, partial(deepoffload.paged, CountingAdam)], ids=["adafactor", "counting"])
def test_a_saved_run_goes_on(paging: Paging, tmp_path: Path, make: Callable[..., Any], precision: str) -> None:
    """With an update still to come at the save, and another budget after the load."""

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            torch.manual_seed(step)
            next_token_loss(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = paging.build(gpt, replace(TIGHT, precision=precision), key="saved")
    optimizer = make(model.parameters())
    state = deepoffload.TrainingState(model, optimizer)
    steps(model, optimizer, range(3))
    state.save(tmp_path / "saved")
    steps(model, optimizer, range(3, 5))
    expected = weights_of(model), shown(optimizer)
    state.load(tmp_path / "saved")
    steps(model, optimizer, range(3, 5))
    assert_same_bits(expected, (weights_of(model), shown(optimizer)))

    other = paging.build(gpt, replace(EVICTING, precision=precision), key="saved", seed=4)
    again = make(other.parameters(), lr=7.0)
    deepoffload.TrainingState(other, again).load(tmp_path / "saved")
    steps(other, again, range(3, 5))
    assert_same_bits(expected, (weights_of(other), shown(again)))


class DurableRun(Run):
    def make_optimizer(self, **settings: Any) -> Any:
        return NADAM(self.model.parameters())


def test_a_durable_step_is_resumed(tmp_path: Path) -> None:
    """With the update of the committed step still to come."""
    said = {**PLACES["half"], "precision": "bf16", "durability": {"every": 1, "path": str(tmp_path)}}
    run = DurableRun(**said)
    for _ in range(3):
        run.step()
    run.state.commit(wait=True)
    committed = run.everything()
    run.step()
    expected = run.everything()
    run.close()
    resumed = DurableRun(**said)
    assert resumed.state.resume() == 3
    assert_same_bits(committed, resumed.everything())
    resumed.step()
    assert_same_bits(expected, resumed.everything())
    resumed.close()


def test_optimizers_take_over_from_each_other(paging: Paging, tmp_path: Path) -> None:
    """``paged(AdamW)`` and ``CPUAdamW`` keep the same arrays; another class starts with its own."""
    model = paging.build(small, TIGHT, key="foreign")
    first = deepoffload.CPUAdamW(model.parameters(), lr=0.01)
    train(model, first, range(2))
    deepoffload.TrainingState(model, first).save(tmp_path / "first")
    expected = copy_of_arrays(first)
    second = ADAMW(model.parameters())
    deepoffload.TrainingState(model, second).load(tmp_path / "first")
    assert_same_bits(expected, copy_of_arrays(second))
    train(model, second, range(2, 4))
    with pytest.raises(UsageError, match="another optimizer"):
        first.state_dict()
    expected = copy_of_arrays(second)
    third = deepoffload.CPUAdamW(model.parameters(), lr=0.01)
    third.load_state_dict(second.state_dict())
    assert_same_bits(expected, copy_of_arrays(third))
    train(model, third, range(4, 5))
    fresh = ADAFACTOR(model.parameters())
    train(model, fresh, range(5, 6))
    assert {int(entry["step"]) for entry in fresh.state_dict()["state"].values()} == {1}


def copy_of_arrays(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: entry[key].clone() for key in ("exp_avg", "exp_avg_sq")} for entry in shown(optimizer).values()]


def test_parameters_beside_paged_ones(paging: Paging) -> None:
    """Ordinary ones in the same optimizer, in a group that comes later."""
    outcomes = []
    for make in (lambda: paging.build(small, EVICTING, key="foreign"), partial(plain, small)):
        model = make()
        torch.manual_seed(4)
        outside = nn.Linear(64, 8)
        paged = is_paged(model)
        kind = NADAM if paged else partial(torch.optim.NAdam, lr=0.01)
        optimizer = kind([{"params": list(model[0].parameters()), "lr": 0.02}])
        optimizer.add_param_group({"params": [*model[2].parameters(), *outside.parameters()], "weight_decay": 0.1})
        for step in range(4):
            outside(model(rows(seed=step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((weights_of(model), weights_of(outside), shown(optimizer)))
    assert_same_bits(outcomes[1], outcomes[0])


def test_a_closure_runs_once(paging: Paging) -> None:
    model = paging.build(small, TIGHT, key="foreign")
    optimizer = ADAFACTOR(model.parameters())
    calls = []

    def closure() -> Any:
        calls.append(1)
        return backward(model, 0)

    assert float(optimizer.step(closure)) > 0 and calls == [1]


def test_state_takes_as_many_bytes_as_the_class_has(paging: Paging) -> None:
    """On disk and in memory; rows and columns stay in ``optimizer.state``."""
    for make, per_element in ((NADAM, 8), (ADAFACTOR, 0), (partial(deepoffload.paged, torch.optim.RMSprop), 4)):
        model = paging.build(small, EVICTING, key="foreign")
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        weights_of(model)
        of_matrices = sum(p.block.nbytes for unit in units_of(model) for p in unit.pieces if p.format.whole)
        matrices = sum(param.numel() for param in model.parameters() if param.dim() == 2)
        vectors = sum(-(-param.numel() // 256) * 256 for param in model.parameters() if param.dim() == 1)
        of_vectors = 4 if make is ADAFACTOR else per_element
        assert of_matrices == matrices * per_element + vectors * of_vectors


def test_lora_in_bf16(paging: Paging) -> None:
    """Frozen weights stay as they are; the adapters follow the master-weight loop."""
    import peft

    def build() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        model = peft.get_peft_model(gpt2(n_layer=1), config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.1)
        return model

    twin = plain(build)
    masters = {id(param): nn.Parameter(param.detach().clone()) for param in twin.parameters()}
    for master in masters.values():
        nudge(master)
    twin.to(torch.bfloat16)  # in place: the same parameters
    object.__setattr__(twin, "fp32_masters", masters)
    model = paging.build(build, replace(TIGHT, precision="bf16"), key="lora")
    made = torch.optim.AdamW
    trained = [[param for param in each.parameters() if param.requires_grad] for each in (twin, model)]
    found = []
    for each, optimizer in (
        (twin, PlainLoop(twin, lambda params: made(params, lr=0.01), trained[0])),
        (model, deepoffload.paged(made, trained[1], lr=0.01)),
    ):
        torch.manual_seed(5)
        found.append((train_on_text(each.train(), optimizer, 5, 2), weights_of(each)))
    assert_same_bits(*found)
    assert deepoffload.stats(model)["evictions"] > 0
