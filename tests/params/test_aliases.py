"""An alias of a weight holds its memory: nothing that a program keeps goes stale when bytes come and
go."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import BudgetError
from deepoffload.params.torch_private import swap_memory
from tests.support.inspect import handle_of, tiers_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, SERIAL, TIGHT, Paging, Same, plain
from tests.support.waiting import settle_transfers


def use_everything(model: nn.Module, times: int = 2) -> None:
    """Push every weight through memory a few times."""
    for _ in range(times):
        model(rows()).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize(
    "take",
    [
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.view(-1),
        lambda p: p[0],
        lambda p: p.t(),
        lambda p: p.data[1:3],
        lambda p: torch.from_numpy(p.detach().numpy()),
        lambda p: torch.from_dlpack(p.detach()),
        lambda p: p.untyped_storage(),
        lambda p: nn.Parameter(p.data),
        lambda p: nn.Parameter(p.detach()[:2]),
    ],
    ids="data detach view row t data-slice numpy dlpack storage parameter parameter-slice".split(),
)
def test_alias_kept_over_evictions_keeps_its_values(same: Same, take: Any) -> None:
    def program(model: nn.Sequential) -> Any:
        kept = take(model[2].weight)
        with torch.no_grad():
            use = [module(rows()) for module in (*model, *model)]
        use_everything(model)
        values = torch.tensor(list(kept)) if isinstance(kept, torch.UntypedStorage) else kept.detach().clone()
        return values, [u.clone() for u in use]

    same(mlp, program)


@pytest.mark.parametrize(
    "take",
    [
        lambda p: torch.from_dlpack(p),
        lambda p: torch.from_numpy(np.from_dlpack(p)),
        lambda p: torch.utils.dlpack.from_dlpack(p.__dlpack__()),
        lambda p: (p.data, torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p)))[1],
    ],
    ids="torch numpy method native".split(),
)
def test_dlpack_of_a_frozen_weight_kept_over_evictions(same: Same, take: Any) -> None:
    """A capsule holds the tensor, not its storage. Of trainable weights torch gives none. The native ``to_dlpack``
    passes no door: of a weight that is away it is an error."""

    def program(model: nn.Sequential) -> Any:
        with torch.no_grad():
            model(rows())
        kept = take(model[2].weight)
        for seed in range(3):
            with torch.no_grad():
                model(rows(seed=seed))
        kept[0] = 2.0
        return kept.clone(), model(rows()).clone()

    same(lambda: mlp().requires_grad_(False), program, key="frozen mlp")


@pytest.mark.parametrize("graph", [True, False], ids=["with-its-graph", "alone"])
def test_native_dlpack_of_a_weight_that_was_trained(same: Same, graph: bool) -> None:
    def program(model: nn.Sequential) -> Any:
        loss = model(rows()).sum()
        loss.backward()
        if not graph:
            del loss
        model.requires_grad_(False)
        weight = model[2].weight
        kept = (weight.data, torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight)))[1]
        for seed in range(3):
            model(rows(seed=seed))
        kept[0] = 2.0
        return kept.clone(), model(rows()).clone()

    same(mlp, program)


def test_frozen_while_an_older_graph_is_alive(same: Same) -> None:
    """The loss of the step before, which every training loop keeps, holds no weight in memory."""

    def program(model: nn.Sequential) -> Any:
        losses = []
        for seed in range(4):
            for layer in model[: 2 * seed]:
                layer.requires_grad_(False)
            loss = model(rows(seed=seed)).square().mean()
            loss.backward()
            losses.append(loss)
            model.requires_grad_(True)
        model.requires_grad_(False)
        return [loss.detach() for loss in losses], model(rows()), gradients_of(model)

    same(mlp, program)


def test_capsule_kept_over_evictions(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        capsule = model[2].weight.__dlpack__()
        for seed in range(3):
            model(rows(seed=seed))
        return torch.utils.dlpack.from_dlpack(capsule).clone()

    same(lambda: mlp().requires_grad_(False), program, key="frozen mlp")


def test_writes_through_an_alias_reach_the_weight(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        kept = model[2].weight.data
        use_everything(model)
        kept.mul_(2)
        use_everything(model)
        array = model[4].bias.detach().numpy()
        use_everything(model)
        array[:] = 3.0
        del kept, array
        use_everything(model)
        return weights_of(model), model(rows()).detach()

    same(mlp, program)


class Cached(nn.Module):
    """Keeps aliases of its own weights, as a cache and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("kept", self.inner[2].weight.detach())
        self.transposed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed is None:
            self.transposed = self.inner[0].weight.detach().t()
        return self.inner(x) + x @ self.transposed + x @ self.kept


def test_aliases_as_buffer_and_cache(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        outputs = []
        for seed in range(3):
            output = model(rows(seed=seed))
            output.square().sum().backward()
            outputs.append(output.detach())
        return outputs, gradients_of(model)

    same(Cached, program)


def test_views_kept_across_modules(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        views = [layer.weight.t() for layer in model[::2]]
        x = rows()
        for view in views:
            x = torch.tanh(x @ view)
        x.sum().backward()
        return x.detach(), gradients_of(model)

    same(mlp, program, room=4.0)


def test_state_dict_kept_over_a_step(same: Same) -> None:
    """Its values are aliases, as in plain PyTorch: after an update they show the new weights."""

    def program(model: nn.Module) -> Any:
        state = {name: value for name, value in model.state_dict().items() if "weight" in name}
        use_everything(model)
        return {name: value.clone() for name, value in state.items()}

    same(mlp, program, room=4.0)


def test_torch_save_writes_the_weights(same: Same) -> None:
    """It collects Python wrappers of storages first and writes later."""

    def program(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return torch.load(file)

    same(mlp, program, room=4.0)


def test_load_state_dict(same: Same) -> None:
    other = {name: torch.randn_like(value) for name, value in mlp().state_dict().items()}

    def program(model: nn.Module) -> Any:
        model.load_state_dict(other)
        use_everything(model)
        return weights_of(model), model(rows()).detach()

    same(mlp, program)


def test_load_state_dict_by_assignment(same: Same) -> None:
    """The new parameters are plain ones: they are adopted when their module is next used."""
    other = {name: torch.randn_like(value) for name, value in mlp().state_dict().items()}

    def program(model: nn.Module) -> Any:
        model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=True)
        output = model(rows())
        output.sum().backward()
        return weights_of(model), output.detach(), gradients_of(model)

    same(mlp, program)


def test_several_parameters_in_one_storage(same: Same) -> None:
    """``vector_to_parameters`` makes each parameter a slice of one vector; each gets separate memory."""

    def program(model: nn.Module) -> Any:
        flat = torch.linspace(-0.3, 0.3, sum(p.numel() for p in model.parameters()))
        nn.utils.vector_to_parameters(flat, model.parameters())
        output = model(rows())
        output.sum().backward()
        return weights_of(model), output.detach(), gradients_of(model)

    same(mlp, program)


@pytest.mark.skipif(swap_memory is None, reason="torch 2.12 can let views keep the old values; an older one is refused")
def test_data_set_to_a_view_of_itself(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        model[2].weight.data = model[2].weight.data.t()
        model[4].weight.data = model[4].weight.data.flip(0)
        model[6].bias.data = model[8].bias.data
        use_everything(model)
        return weights_of(model)

    same(mlp, program)


def test_parameters_to_vector(same: Same) -> None:
    same(mlp, lambda m: nn.utils.parameters_to_vector(m.parameters()).detach(), room=4.0)


def test_deepcopy_is_a_plain_model(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        twin = copy.deepcopy(model)
        use_everything(model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(2)
        output = twin(rows())
        output.sum().backward()
        return weights_of(model), weights_of(twin), gradients_of(twin), gradients_of(model), model(rows()).detach()

    same(mlp, program)


def test_pickled_model_is_a_plain_model(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        return weights_of(twin), twin(rows()).detach()

    same(mlp, program, room=4.0)


def test_held_aliases_of_everything_end_in_a_clear_error(paging: Paging) -> None:
    """More than the budget cannot be held; the error names what holds it, and the model goes on when it is let go."""
    model = paging.build(lambda: mlp(depth=12), TIGHT)
    expected = model(rows()).detach()
    held: list[Any] = []
    with pytest.raises(BudgetError, match=r"still referred to by the program|foreach=False"):
        for param in model.parameters():
            held.append(param.detach())
    held.clear()
    assert_same_bits(expected, model(rows()).detach())


def test_aliases_in_reference_cycles_are_collected(paging: Paging) -> None:
    model = paging.build(lambda: mlp(depth=12), TIGHT)
    for param in [*model.parameters()] * 3:
        cycle: list[Any] = [param.detach()]
        cycle.append(cycle)
    assert_same_bits(plain(lambda: mlp(depth=12))(rows()).detach(), model(rows()).detach())


def test_exponential_moving_average(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        average = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for seed in range(3):
            model(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
        return average

    same(mlp, program, room=4.0)


def test_unseen_edit_that_brings_old_values_back(paging: Paging) -> None:
    """Weights are swapped for an average and back: what is on disk by then is not what was there at the first look."""
    model = paging.build(mlp, SERIAL)
    weight: Any = model[0].weight
    block, tiers = handle_of(weight).block, tiers_of(model)
    old = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(torch.ones_like(old))
        assert tiers.write_behind(block)
        settle_transfers(tiers)
        weight.data.copy_(old)
    assert tiers.evict(block)
    assert_same_bits(old, weight.detach().clone())


def test_edit_of_a_weight_lands_in_the_master(paging: Paging) -> None:
    """After ``copy_`` the fp32 master of a bf16 weight is exactly what was written, not that plus an old remainder."""
    from dataclasses import replace

    model = paging.build(mlp, replace(EVICTING, precision="bf16"))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=2.0**-11, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    for value, edit in (
        (1.0, lambda p: p.copy_(torch.ones_like(p))),
        (2.0, lambda p: p.data.fill_(2.0)),
        (0.5, lambda p: p.fill_(0.5)),
        (4.0, lambda p: setattr(p, "data", torch.full_like(p, 4.0))),
    ):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                edit(param)
        for _ in range(3 if value == 1.0 else 0):  # 3 / 2048 below 1.0 rounds back to 1.0 - 1 / 256 or stays, as bf16
            optimizer.step()
        for param in model.parameters():
            expected = value - 3 / 2048 if value == 1.0 else value
            assert bool((param == torch.tensor(expected, dtype=torch.bfloat16)).all())
