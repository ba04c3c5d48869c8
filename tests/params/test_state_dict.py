"""``state_dict()`` of a model larger than the budget: values that behave as plain PyTorch's, without holding memory."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepoffload import stats
from deepoffload.errors import ClosedError, IoFailure, UnsupportedError
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.state_dict_values import LazyValue
from deepoffload.runtime.context import engine_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import gpt2, mlp, rows
from tests.support.paging import EVICTING, TIGHT, Paging, Same, plain


def deep(width: int = 64) -> nn.Sequential:
    """Several times the budgets of these tests."""
    return mlp(width, depth=16)


def test_values_hold_no_memory(paging: Paging) -> None:
    model = paging.build(deep, TIGHT)
    state = model.state_dict()
    assert list(state) == list(mlp(depth=16).state_dict())
    for name, value in state.items():
        param = model.get_parameter(name)
        assert type(value) is LazyValue and isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        assert (value.shape, value.dtype, value.stride()) == (param.shape, param.dtype, param.stride())
        assert value.is_contiguous() and value.device == param.device and not value.requires_grad and value.is_leaf
        assert value.numel() == param.numel() and len(value) == len(param) and value.storage_offset() == 0
    model(rows()).sum().backward()  # with the state dict held, everything still fits


def test_values_are_the_weights(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        state = model.state_dict()
        found = [
            {name: value.clone() for name, value in state.items()},
            [torch.equal(value, state[name]) for name, value in model.state_dict().items()],
            [float(value.double().norm()) for value in state.values()],
            [value[:3].sum() for value in state.values()],
            [(value - 1.0).abs().max() for value in state.values()],
            [value.numpy().sum().item() for value in state.values()],
            [value.detach().cpu().contiguous().to(value.dtype).clone() for value in state.values()],
            torch.cat([state["0.bias"], state["2.bias"]]),
            state["0.weight"].tolist(),
        ]
        assert all(value.cpu() is value for value in state.values())
        return found

    same(deep, program, key="deep")


def test_values_follow_the_weights_and_writes_reach_them(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        state = model.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model(rows()).square().mean().backward()
        optimizer.step()
        after = {name: value.clone() for name, value in state.items()}
        state["2.weight"].mul_(0.5)
        state["4.weight"][0] = 1.0
        with torch.no_grad():
            state["6.weight"].copy_(state["8.weight"])
            state["10.bias"].data.fill_(0.25)
        return after, weights_of(model), model(rows()).detach()

    same(deep, program, key="deep")


def test_kept_in_a_copy(same: Same) -> None:
    """The usual ways to remember the best weights so far."""

    def program(model: nn.Module) -> Any:
        kept = [
            copy.deepcopy(model.state_dict()),
            {name: value.clone() for name, value in model.state_dict().items()},
            {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
        ]
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert all(type(value) is Tensor for one in kept for value in one.values())
        model.load_state_dict(kept[0])
        return kept, weights_of(model)

    same(deep, program, key="deep")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("paged", [False, True], ids=["into-plain", "into-paged"])
def test_loaded_into_another_model(paging: Paging, assign: bool, paged: bool) -> None:
    source = paging.build(deep, TIGHT)
    target = paging.build(deep, TIGHT, seed=1) if paged else plain(deep, seed=1)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert_same_bits(weights_of(source), weights_of(target))
    for model in (source, target):
        model(rows()).square().mean().backward()
    assert_same_bits(gradients_of(source), gradients_of(target))


def test_loaded_into_itself_by_assignment(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        model.load_state_dict(model.state_dict(), assign=True)
        assert all(isinstance(param, nn.Parameter) and param.requires_grad for param in model.parameters())
        loss = model(rows()).square().mean()
        loss.backward()
        return loss.detach(), weights_of(model), gradients_of(model)

    same(deep, program, key="deep", room=2.0)


def test_parameter_made_of_a_value_is_paged(paging: Paging) -> None:
    model = paging.build(deep, TIGHT)
    made = nn.Parameter(model.state_dict()["0.weight"])
    frozen = nn.Parameter(model.state_dict()["2.weight"], requires_grad=False)
    assert type(made) is OffloadedParameter and made.requires_grad and made is not model[0].weight
    assert type(frozen) is OffloadedParameter and not frozen.requires_grad
    (made.sum() + frozen.sum()).backward()
    assert_same_bits(torch.ones(64, 64), made.grad.clone())
    assert frozen.grad is None and model[0].weight.grad is None


def test_torch_save(paging: Paging) -> None:
    """torch.save keeps all storages until it ends."""
    model = paging.build(deep, TIGHT)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_bits(weights_of(plain(deep)), dict(loaded["model"]))
    assert stats(model)["evictions"] > 0


def test_safetensors(paging: Paging, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = paging.build(deep, TIGHT)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_same_bits(
        dict(sorted(weights_of(plain(deep)).items())), dict(sorted(load_file(tmp_path / "model.safetensors").items()))
    )


def test_addresses_are_those_of_copies_that_follow(paging: Paging) -> None:
    model = paging.build(deep, EVICTING)
    tied = nn.Sequential(model[0], model[2], model[0])
    state = tied.state_dict()
    addresses = {name: value.data_ptr() for name, value in state.items()}
    assert addresses["0.weight"] == addresses["2.weight"] != addresses["1.weight"]
    assert all(value.untyped_storage().data_ptr() == addresses[name] for name, value in state.items())
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model(rows())
    storage = state["0.weight"].untyped_storage()
    assert_same_bits(torch.full((64, 64), 3.0), torch.tensor([]).set_(storage, 0, (64, 64)))


def test_transformers_own_save_pretrained(paging: Paging, tmp_path: Path) -> None:
    model = paging.build(gpt2, TIGHT)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    assert_same_bits(weights_of(plain(gpt2)), weights_of(reloaded))


def test_values_take_no_gradient(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    with pytest.raises(UnsupportedError, match=r"state_dict\(\) \(0\.weight\) takes no gradient; clone"):
        model.state_dict()["0.weight"].requires_grad_()


def test_values_of_a_closed_engine_are_refused(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    state = model.state_dict()
    engine_of(model).close()
    assert state["0.weight"].shape == (64, 64)
    with pytest.raises(ClosedError):
        state["0.weight"].clone()


def test_values_keep_their_weights_alive(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    expected = weights_of(model)
    state = model.state_dict()
    del model
    assert_same_bits(expected, {name: value.clone() for name, value in state.items()})


def test_full_disk_is_an_error(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    model = paging.build(mlp, TIGHT)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(IoFailure, match=r"reserving a copy of 0\.weight failed with ENOSPC.*where the swap files are"):
        model.state_dict()["0.weight"].data_ptr()


def test_without_nvme_an_address_is_the_weights(nvme_path: Path) -> None:
    from deepoffload import offload_context

    with offload_context(host_budget="8MiB"):
        model = mlp()
    value = model.state_dict()["0.weight"]
    assert value.data_ptr() == model[0].weight.data_ptr()
