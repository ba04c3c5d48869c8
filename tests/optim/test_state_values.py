"""``optimizer.state_dict()`` of paged parameters: values hold no memory, show later steps, and are loaded by pieces."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import ClosedError, IoFailure, UsageError
from deepoffload.params.state_dict_values import LazyValue
from deepoffload.runtime.context import engine_of
from tests.checkpoint.training import ALL
from tests.optim.kinds import KINDS, STORED, Kind
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, SERIAL, Paging
from tests.support.programs import Programs

ADAMW_8BIT = next(kind for kind in STORED if "8bit" in kind.name)
BUDGET_BYTES = 400 << 10
ROOT = Path(__file__).parents[2]


def small() -> nn.Sequential:
    return mlp(depth=4)


def build(paging: Paging, precision: str = "bf16", *, seed: int = 0, make: Callable[[], Any] = small) -> Any:
    with paging.context(replace(EVICTING, precision=precision), BUDGET_BYTES):
        torch.manual_seed(seed)
        return make()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        dtype = next(model.parameters()).dtype
        model(rows(seed=step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(state: dict[str, Any]) -> Any:
    return {n: {key: value.clone() for key, value in sorted(state["state"][n].items())} for n in sorted(state["state"])}


@pytest.mark.parametrize("precision", ["bf16", "keep", "fp16"])
@pytest.mark.parametrize("kind", (KINDS[0], ADAMW_8BIT), ids=str)
def test_values_show_later_steps_and_copies_do_not(paging: Paging, kind: Kind, precision: str) -> None:
    """As in plain PyTorch; and all of one dict are of the same step, the step count among them."""
    model = build(paging, precision)
    optimizer = kind.ours(model.parameters())
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert all(type(value) is LazyValue for entry in state["state"].values() for value in entry.values())
    addresses = [value.data_ptr() for entry in state["state"].values() for value in entry.values()]
    before, kept = values_of(state), copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    train(model, optimizer, range(2, 3))
    assert_same_bits(values_of(optimizer.state_dict()), values_of(state))
    assert int(state["state"][0]["step"]) == 3 and not torch.equal(state["state"][0]["exp_avg"], before[0]["exp_avg"])
    assert addresses == [value.data_ptr() for entry in state["state"].values() for value in entry.values()]
    file.seek(0)
    for snapshot in (kept, torch.load(file, weights_only=True)):
        assert all(type(value) is Tensor for entry in snapshot["state"].values() for value in entry.values())
        assert_same_bits(before, values_of(snapshot))
    again = pickle.loads(pickle.dumps(state))
    assert_same_bits(values_of(state), values_of(again))


def test_ordinary_parameters_in_the_same_dict(paging: Paging) -> None:
    """What an optimizer stores in another type, or in other tensors after a step, is of the same step, too."""
    model, outside = build(paging), nn.Linear(64, 8, dtype=torch.bfloat16)
    optimizer = ADAMW_8BIT.ours([*model.parameters(), *outside.parameters()])
    whole = nn.Sequential(model, outside)
    train(whole, optimizer, range(2))
    state = optimizer.state_dict()
    train(whole, optimizer, range(2, 3))
    assert_same_bits(values_of(optimizer.state_dict()), values_of(state))
    assert {int(entry["step"]) for entry in state["state"].values()} == {3}


def test_a_written_value_is_the_programs_own(paging: Paging) -> None:
    """It shows no later step, changes nothing, and load_state_dict takes it."""
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    written = state["state"][0]["exp_avg"]
    written[3].fill_(0.5)
    torch._foreach_mul_([state["state"][2]["exp_avg"], state["state"][2]["exp_avg_sq"]], 2.0)
    expected = values_of(state)
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], written)
    train(model, optimizer, range(2, 3))
    assert_same_bits(expected[0]["exp_avg"], written.clone())
    weights = weights_of(model)
    optimizer.load_state_dict({**state, "state": {n: entry for n, entry in state["state"].items() if n in (0, 2)}})
    now = values_of(optimizer.state_dict())
    for number, key in ((0, "exp_avg"), (2, "exp_avg"), (2, "exp_avg_sq")):
        assert_same_bits(expected[number][key], now[number][key])
    assert_same_bits(weights, weights_of(model))


def test_what_is_written_by_address_is_loaded(paging: Paging) -> None:
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    array, shared = state["state"][0]["exp_avg"].numpy(), state["state"][1]["exp_avg_sq"].untyped_storage()
    array[3] = 0.5
    torch.empty(0).set_(shared, 0, (64,))[7] = 0.25
    expected = values_of(state)
    assert float(expected[0]["exp_avg"][3, 3]) == 0.5 and float(expected[1]["exp_avg_sq"][7]) == 0.25
    optimizer.load_state_dict(state)
    assert_same_bits(expected, values_of(optimizer.state_dict()))


def test_torchs_optimizer_takes_values_over(paging: Paging) -> None:
    """It keeps what it is given and writes to it: ours goes on as if nothing had happened."""
    model, twin = build(paging, "keep"), small()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    twin.load_state_dict(weights_of(model))
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    before = values_of(optimizer.state_dict())
    train(twin, theirs, range(2, 4))
    assert_same_bits(before, values_of(optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    for name, value in weights_of(twin).items():
        torch.testing.assert_close(weights_of(model)[name], value, rtol=1e-5, atol=1e-6)


def test_addresses_agree(paging: Paging) -> None:
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(1))
    for entry in optimizer.state_dict()["state"].values():
        for value in entry.values():
            assert value.untyped_storage() is value.untyped_storage()
            assert value.data_ptr() == value.untyped_storage().data_ptr() == value.view(-1)[0].data_ptr()
            assert value.view(-1)[-1].data_ptr() == value.data_ptr() + (value.numel() - 1) * value.element_size()
            assert_same_bits(value.clone(), torch.from_numpy(value.numpy().copy()))


@pytest.mark.parametrize("change", ["load", "other", "first", "close"])
def test_a_state_that_is_no_more_is_an_error(paging: Paging, change: str) -> None:
    """In plain PyTorch the old arrays would live on; here the pieces hold new ones."""
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    if change != "first":
        train(model, optimizer, range(1))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    value = state["state"][0]["remainder"]
    if change == "load":
        optimizer.load_state_dict(kept)
    if change == "other":
        train(model, deepoffload.CPULion(model.parameters()), range(1))
    if change == "first":
        train(model, optimizer, range(1))
    if change == "close":
        engine_of(model).close()
        with pytest.raises(ClosedError):
            value.clone()
        return
    for use in (value.clone, value.data_ptr, lambda: copy.deepcopy(state), lambda: optimizer.load_state_dict(state)):
        with pytest.raises(UsageError, match=r" of 0\.weight.*no more.*state_dict\(\) again.*deepcopy"):
            use()
    optimizer.load_state_dict(kept)
    assert_same_bits(values_of(kept), values_of(optimizer.state_dict()))


def test_loaded_into_itself_and_into_others(paging: Paging) -> None:
    """Also with the arrays of two parameters exchanged, which lie in pieces that the loading changes."""
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    before = values_of(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(before, values_of(optimizer.state_dict()))
    state = optimizer.state_dict()
    state["state"][0], state["state"][2] = state["state"][2], state["state"][0]
    optimizer.load_state_dict(state)
    assert_same_bits({**before, 0: before[2], 2: before[0]}, values_of(optimizer.state_dict()))
    other = build(paging, seed=1)
    other.load_state_dict(model.state_dict())
    second = deepoffload.CPUAdamW(other.parameters(), state_dtype="fp32")
    second.load_state_dict(optimizer.state_dict())
    for each, its in ((model, optimizer), (other, second)):
        train(each, its, range(3, 5))
    assert_same_bits(weights_of(model), weights_of(other))
    third = deepoffload.CPUAdamW(model.parameters())
    third.load_state_dict(optimizer.state_dict())
    assert_same_bits(values_of(second.state_dict()), values_of(third.state_dict()))


def test_arrays_that_the_optimizer_does_not_know_are_kept_as_they_were(paging: Paging) -> None:
    """As in torch. Lion has one of Adam's arrays; the other is of a state that is no more."""
    model = build(paging)
    adam = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, amsgrad=True)
    train(model, adam, range(2))
    before = values_of(adam.state_dict())
    lion = deepoffload.CPULion(model.parameters(), lr=1e-3)
    lion.load_state_dict(adam.state_dict())
    train(model, lion, range(2, 3))
    after = values_of(copy_through_a_file(lion.state_dict()))
    for number in range(8):
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            assert_same_bits(before[number][key], after[number][key])
        assert not torch.equal(before[number]["exp_avg"], after[number]["exp_avg"])


def copy_through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_views_of_values_are_loaded(paging: Paging) -> None:
    """A part of the weights as an array, a transposed one, and parts of others."""
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    entry, other = state["state"][0], state["state"][2]
    given = {
        "exp_avg": entry["exp_avg"].t(),
        "exp_avg_sq": torch.Tensor.view(other["exp_avg_sq"], 8, 8, 64).flatten(0, 1).t(),
        "remainder": other["remainder"].flip(0),
    }
    expected = {key: value.clone() for key, value in given.items()}
    optimizer.load_state_dict({**state, "state": {0: {"step": entry["step"], **given}}})
    now = values_of(optimizer.state_dict())[0]
    for key, value in expected.items():
        assert_same_bits(value, now[key])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(24, 40, 5)
        self.first.weight = nn.Parameter(self.first.weight.detach().to(memory_format=torch.channels_last))
        self.second = nn.Linear(40, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mean((2, 3)))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp64": lambda value: value.double(),
    "bf16": lambda value: value.bfloat16(),
    "contiguous": lambda value: value.contiguous(),
    "channels last": lambda value: value.to(memory_format=torch.channels_last) if value.dim() == 4 else value,
    "reversed": lambda value: value.permute(*range(value.dim())[::-1]).contiguous().permute(*range(value.dim())[::-1]),
    "part of more": lambda value: torch.stack([value, value], -1)[..., 1],
    "expanded": lambda value: value.flatten()[:1].view([1] * value.dim()).expand(value.shape),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_type_and_stride_is_loaded(paging: Paging, form: str) -> None:
    """What ``torch.load`` gives has the type and the strides of what was saved."""
    model = build(paging, "keep", make=Convolutions)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(torch.randn(2, 24, 6, 6)).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = FORMS[form](entry[key])
    optimizer.load_state_dict(state)
    expected = {n: {key: value.float() for key, value in entry.items()} for n, entry in values_of(state).items()}
    assert_same_bits(expected, values_of(optimizer.state_dict()))


def test_a_value_put_into_the_state_of_an_ordinary_parameter(paging: Paging) -> None:
    model, outside = build(paging, "keep"), nn.Parameter(torch.zeros(64, 64))
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(1))
    found = []
    for copied in (True, False):
        value = optimizer.state_dict()["state"][0]["exp_avg"]
        other = deepoffload.CPUAdamW([outside], lr=1e-2)
        outside.grad = torch.ones(64, 64)
        other.step()
        other.state[outside]["exp_avg"] = value.clone() if copied else value
        for _ in range(2):
            other.step()
        found.append([outside.detach().clone(), other.state[outside]["exp_avg"].clone()])
        outside.data.zero_()
    assert_same_bits(*found)


def test_state_of_another_shape_is_refused(paging: Paging) -> None:
    """Also where a program has put it into ``optimizer.state``, which nothing has checked."""
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(3, 64).t()
    with pytest.raises(ValueError, match=r"state of 0\.weight has shape \(64, 3\), the parameter \(64, 64\)"):
        train(model, optimizer, range(1))


def test_a_full_disk_is_an_error(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(1))
    state = optimizer.state_dict()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(IoFailure, match=r"copy of exp_avg of 0\.weight failed with ENOSPC.*optimizer's state"):
            torch.save(state, io.BytesIO())
    torch.save(state, io.BytesIO())


@pytest.mark.parametrize("kind", (KINDS[0], ADAMW_8BIT), ids=str)
def test_saving_reads_every_piece_once(paging: Paging, kind: Kind) -> None:
    """All arrays of a parameter lie in the same pieces, of which only a few fit into memory."""

    def train_once(seed: int) -> None:
        model(rows(width=512, seed=seed).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with paging.context(replace(SERIAL, precision="bf16"), 3 << 20):
        torch.manual_seed(0)
        model = mlp(width=512, depth=8)
    optimizer = kind.ours(model.parameters())
    train_once(0)
    engine: Any = engine_of(model)
    stored_bytes = sum(piece.block.nbytes for unit in units_of(engine) for piece in unit.pieces)
    state, before = optimizer.state_dict(), engine.stats()["disk_bytes_read"]
    torch.save(state, io.BytesIO())
    read_bytes = engine.stats()["disk_bytes_read"] - before
    print(f"read {read_bytes}, stored {stored_bytes}")
    assert read_bytes < 1.2 * stored_bytes
    torch.save(state, io.BytesIO())
    assert engine.stats()["disk_bytes_read"] == before + read_bytes, "the copies are still right"
    train_once(1)
    assert_same_bits(values_of(optimizer.state_dict()), values_of(copy_through_a_file(state)))


def test_without_nvme(paging: Paging) -> None:
    with deepoffload.offload_context(host_budget="8MiB", precision="bf16"):
        model = small()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    train(model, optimizer, range(2, 3))
    assert_same_bits(values_of(optimizer.state_dict()), values_of(state))
    optimizer.load_state_dict(kept)
    assert_same_bits(values_of(kept), values_of(optimizer.state_dict()))


def test_values_keep_their_optimizers_state(paging: Paging) -> None:
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    expected = values_of(state)
    del model, optimizer
    assert_same_bits(expected, values_of(state))


def test_room_on_the_disk_comes_back(paging: Paging) -> None:
    model = build(paging)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(1))
    files = len(os.listdir("/proc/self/fd"))
    state = optimizer.state_dict()
    assert len(os.listdir("/proc/self/fd")) == files
    torch.save(state, io.BytesIO())
    assert len(os.listdir("/proc/self/fd")) > files
    del state
    assert len(os.listdir("/proc/self/fd")) == files


PROGRAM = """
import json, sys
import torch
from torch import nn
import deepoffload
from tests.support.memory_watch import MemoryWatch, populate
from tests.support.inspect import tiers_of

path, swap, doing, width, depth, budget = sys.argv[1:]
tiny = nn.Linear(8, 8)
torch.save(deepoffload.CPUAdamW(tiny.parameters()).state_dict(), path + ".warm")
torch.load(path + ".warm", mmap=True)
with deepoffload.offload_context(host_budget=int(budget), nvme_path=swap, precision="bf16") as context:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(int(width), int(width)) for _ in range(int(depth))])
optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
populated = populate(tiers_of(context.engine).arena)

def step():
    model(torch.ones(2, int(width), dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

watch = MemoryWatch()
step()
step()
training = watch.take_peak()
if doing == "save":
    torch.save(optimizer.state_dict(), path)
else:
    optimizer.load_state_dict(torch.load(path, mmap=True, weights_only=True))
    step()
numel = sum(p.numel() for p in model.parameters())
print(json.dumps({"populated": populated, "training": training, "peak": watch.take_peak(), "state": numel * 10}))
context.engine.close()
"""


@pytest.mark.slow
def test_memory(programs: Programs, tmp_path: Path, nvme_path: Path) -> None:
    """Saving and loading mapped take 64 MiB in addition to training at most (125 M parameters: ``CHECKPOINTS=all``)."""
    width, depth, budget = (2048, 30, 64 << 20) if ALL else (1024, 14, 16 << 20)
    for doing in ("save", "load"):
        arguments = [str(tmp_path / "optimizer.pt"), str(nvme_path), doing, *map(str, (width, depth, budget))]
        done = programs.run(PROGRAM, *arguments, timeout_s=280)
        assert done.returncode == 0, done.stderr[-3000:]
        seen = json.loads(done.stdout.splitlines()[-1])
        print(doing, {key: value / (1 << 20) for key, value in seen.items()})
        if not seen["populated"]:
            pytest.skip("the kernel cannot populate a mapping, so what saving takes cannot be told from the budget")
        assert seen["state"] > 8 * budget
        assert seen["peak"] <= seen["training"] + (64 << 20)
