"""Training with activations that leave: the bits of plain PyTorch, on every tier, with both kinds of checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import deepoffload
from deepoffload import stats
from deepoffload.runtime.context import engine_of
from tests.accumulation.loops import HORIZONTAL, VERTICAL, VERTICAL_AGAIN, Steps
from tests.activations import on_ranks
from tests.support.loops import assert_same_bits, gradients_of, train
from tests.support.models import TinyGPT, batch, llama, mixtral, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain
from tests.support.rank_processes import values_of
from tests.support.waiting import settle_transfers

PART = 16 << 10
"""Room for two block inputs."""
ON_NVME = {"offload_activations": "nvme", "activation_budget": PART}
EVERYTHING = ON_NVME | {"offload_activations_above": 1, "activation_budget": 4 * PART}
LEARNING = {"lr": 1e-2, "betas": (0.9, 0.95)}


def paged(paging: Paging, build: Callable[[], Any], setting: Setting, *, key: object = None, **config: Any) -> Any:
    """A model in the budget of ``setting``, with the part for activations on top of it."""
    budget = paging.least_bytes(build, setting, key=key) * (setting.room or 100)
    with paging.context(setting, int(budget) + config["activation_budget"], **config):
        torch.manual_seed(0)
        return build()


def checkpointed(build: Callable[[], Any]) -> Any:
    model = build()
    model.gradient_checkpointing_enable()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": partial(TinyGPT, checkpointing=False),
    "gpt, reentrant": partial(TinyGPT, checkpointing=True),
    "llama": partial(checkpointed, llama),
    "mixtral": partial(checkpointed, mixtral),
}


CASES = [
    *(("gpt", RESIDENT), ("gpt", EVICTING), ("gpt, reentrant", RESIDENT), ("gpt, reentrant", TIGHT)),
    *(("llama", TIGHT), ("mixtral", EVICTING)),
]


@pytest.mark.parametrize(("name", "setting"), CASES, ids=str)
def test_block_inputs_leave(paging: Paging, name: str, setting: Setting) -> None:
    reference = plain(MODELS[name])
    expected = train(reference, deepoffload.CPUAdamW(reference.parameters(), **LEARNING), steps=5)
    model = paged(paging, MODELS[name], setting, key=f"{name} behind checkpoints", **ON_NVME)
    got = train(model, deepoffload.CPUAdamW(model.parameters(), **LEARNING), steps=5)
    assert_same_bits(vars(expected), vars(got))
    gc.collect()  # once in a full run, a part of the last graph was still there
    found, layers = stats(model), 4 if name.startswith("gpt") else len(model.model.layers)
    assert found["activations_taken"] == 5 * layers
    assert found["activation_bytes"] == found["activation_host_bytes"] == 0, "backward has used all of them"
    assert found["activation_host_peak_bytes"] <= found["activation_budget_bytes"] == 16 << 10
    if layers > 2 or setting is EVICTING:
        assert 0 < found["activation_bytes_read"] <= found["activation_bytes_written"]


def test_what_fits_is_not_written(paging: Paging) -> None:
    """After a first step it is known how much comes."""
    model = paged(paging, MODELS["gpt"], RESIDENT, **ON_NVME | {"activation_budget": 2 * PART})
    train(model, deepoffload.CPUAdamW(model.parameters(), **LEARNING), steps=1)
    store = engine_of(model).activations
    assert store is not None
    settle_transfers(store.tiers)  # a write that is still under way holds memory
    before = stats(model)
    train(model, deepoffload.CPUAdamW(model.parameters(), **LEARNING), steps=3)
    after = stats(model)
    assert after["activations_taken"] == 4 * before["activations_taken"]
    assert after["activation_bytes_written"] == before["activation_bytes_written"]
    assert after["activation_bytes_read"] == before["activation_bytes_read"] == 0


@pytest.mark.parametrize(
    ("config", "above"), [({"offload_activations": "host"}, None), (ON_NVME, None), (ON_NVME, 1)], ids=str
)
def test_a_device_with_its_own_memory(paging: Paging, config: dict[str, Any], above: int | None) -> None:
    """``debug.copies``: the way of activations is that of a GPU, with events that have happened."""
    config = config | {"debug": {"copies": True, "poison": True}, "device": "cpu", "device_budget": "8MiB"}
    config |= {"offload_activations_above": above, "activation_budget": 16 * PART if above else 2 * PART}
    reference = plain(MODELS["gpt"])
    expected = train(reference, deepoffload.CPUAdamW(reference.parameters(), **LEARNING))
    with deepoffload.offload_context(host_budget="64MiB", nvme_path=str(paging.nvme_path), **config):
        torch.manual_seed(0)
        model = MODELS["gpt"]()
    got = train(model, deepoffload.CPUAdamW(model.parameters(), **LEARNING))
    assert_same_bits(vars(expected), vars(got))
    assert stats(model)["activations_taken"] >= 3 * 4


@pytest.mark.parametrize("how", [HORIZONTAL, VERTICAL, VERTICAL_AGAIN])
def test_accumulate(paging: Paging, how: str) -> None:
    steps = Steps(next_token_loss, batch, micro_batches=4, steps=3)
    reference = plain(MODELS["gpt"])
    expected = steps.run(reference, "plain", deepoffload.CPUAdamW(reference.parameters(), lr=1e-2, max_grad_norm=0.5))
    model = paged(paging, MODELS["gpt"], TIGHT, key="gpt behind checkpoints", **ON_NVME)
    assert_same_bits(expected, steps.run(model, how))
    assert stats(model)["activations_taken"] >= 3 * 4 * 4
    assert stats(model)["activation_bytes_read"] > 0


@pytest.mark.parametrize("overlap", ["none", "in_backward", "speculative"])
def test_updates_inside_backward(paging: Paging, overlap: str) -> None:
    reference = plain(MODELS["gpt"])
    expected = train(reference, deepoffload.CPUAdamW(reference.parameters(), lr=1e-2), steps=5)
    setting = Setting("tight", 2.0, step_overlap=overlap)
    model = paged(paging, MODELS["gpt"], setting, key="gpt behind checkpoints", **EVERYTHING)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model.train()
    torch.manual_seed(7)
    losses = []
    for step in range(5):
        loss = next_token_loss(model, batch(7000 + 10 * step))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(expected.losses, losses)
    assert_same_bits(expected.final, {name: param.detach().clone() for name, param in model.named_parameters()})


def test_ranks_keep_theirs(tmp_path: Path) -> None:
    for found in values_of(on_ranks.both_ways, 2, str(tmp_path)):
        assert found["activations_taken"] == 3 * 4
        assert found["activation_budget_bytes"] == PART, "its half of what the host has"


# -- what else is saved, and how graphs are used --------------------------------------------------------------------


def run(model: nn.Module, how: str) -> Any:
    x = rows(64).requires_grad_()
    loss = model(x).square().mean()
    if how == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "gradient of a gradient":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
    elif how == "several graphs":
        other = model(rows(64, seed=9)).sin().sum()
        loss.backward(retain_graph=True)
        other.backward()
        loss.backward()
    elif how == "dropped":
        del loss
        model(x).sum().backward()
    return x.grad, gradients_of(model)


@pytest.mark.parametrize("how", ["twice", "gradient of a gradient", "several graphs", "dropped"])
def test_every_use_of_a_graph(paging: Paging, how: str) -> None:
    expected = run(plain(mlp), how)
    model = paged(paging, mlp, TIGHT, **EVERYTHING)
    assert_same_bits(expected, run(model, how))
    found = stats(model)
    assert found["activations_taken"] >= 6 and found["activation_bytes_read"] > 0
    assert found["activation_bytes"] == 0


class Shares(nn.Module):
    """Saves one storage many times: as it is, transposed, in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        first, second = x.chunk(2)
        y = sum(layer(x) for layer in self.layers)
        return y + (x.t() @ x)[:1] + torch.cat([first.sin() * second, second.cos() * first])


def test_one_storage_is_stored_once(paging: Paging) -> None:
    def program(model: nn.Module) -> Any:
        x = rows(64).requires_grad_()
        model(x).square().mean().backward()
        return x.grad, gradients_of(model)

    expected = program(plain(Shares))
    model = paged(paging, Shares, TIGHT, **EVERYTHING)
    assert_same_bits(expected, program(model))
    nbytes = 64 * 64 * 4
    # x itself, the two parts' sin and cos, the sum before its square, and no second copy of x
    assert stats(model)["activation_bytes_taken"] <= 4 * nbytes


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell], ids=lambda kind: kind.__name__)
def test_parts_of_one_storage_with_counters_of_their_own(paging: Paging, kind: type[nn.Module]) -> None:
    """torch's cells cut their gates with ``unsafe_chunk`` and change each part in place: the counters stand equally
    high, and the bytes are others."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.cell(x)
            return found if torch.is_tensor(found) else found[0] + found[1]

    def program(model: nn.Module) -> Any:
        model(rows(64)).square().mean().backward()
        return gradients_of(model)

    expected = program(plain(Gates))
    assert_same_bits(expected, program(paged(paging, Gates, RESIDENT, **EVERYTHING)))


def test_an_input_that_is_filled_anew(paging: Paging) -> None:
    """numpy moves no counter, and the graph of the values before is still there."""

    def program(model: nn.Module) -> Any:
        values = rows(64, seed=1).numpy()
        inputs = torch.from_numpy(values)
        before = model(inputs).mean()
        values[:] = rows(64, seed=2).numpy()
        model(inputs).square().mean().backward()
        return before.detach(), gradients_of(model)

    expected = program(plain(mlp))
    assert_same_bits(expected, program(paged(paging, mlp, RESIDENT, **EVERYTHING)))


def test_changes_in_place_are_noticed(paging: Paging) -> None:
    class Edits(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self[0](x).sin()
            z = self[2](y)  # saves y, which sin does not
            y.add_(1)
            return z

    def message(model: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            model(rows(64)).sum().backward()
        return str(caught.value)

    expected = message(plain(lambda: Edits(*mlp(depth=2))))
    model = paged(paging, lambda: Edits(*mlp(depth=2)), TIGHT, **EVERYTHING)
    got = message(model)
    assert stats(model)["activations_taken"] > 0
    assert "modified by an inplace operation" in expected
    assert got.replace("output 0 of Sin", "output 0 of Add") == expected, "what made it is looked up when it is saved"


class Selective(nn.Module):
    """torch's selective checkpoint: the products of matrices are kept by the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(depth=2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        for layer in self.layers:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


def test_selective_checkpoints_go_first(paging: Paging) -> None:
    def program(model: nn.Module) -> Any:
        model(rows(64).requires_grad_()).square().mean().backward()
        return gradients_of(model)

    expected = program(plain(Selective))
    model = paged(paging, Selective, TIGHT, **ON_NVME)
    assert_same_bits(expected, program(model))
    assert stats(model)["activations_taken"] == 3, "the first input is the program's own leaf"


def test_hooks_of_the_program_go_first(paging: Paging) -> None:
    def program(model: nn.Module) -> Any:
        with torch.autograd.graph.save_on_cpu():
            loss = next_token_loss(model, batch(1))
        loss.backward()
        return loss.detach(), gradients_of(model)

    torch.manual_seed(3)
    expected = program(plain(MODELS["gpt"]).eval())
    model = paged(paging, MODELS["gpt"], RESIDENT, **ON_NVME)
    assert_same_bits(expected, program(model.eval()))
    assert stats(model)["activations_taken"] == 0
