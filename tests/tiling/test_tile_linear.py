"""Layers in tiles: the same numbers as the same tiles in plain PyTorch, in budgets that cannot hold the layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.errors import BudgetError, UnsupportedError, UsageError
from deepoffload.tiling.linear import LinearInTiles
from tests.support.inspect import tiers_of, units_of
from tests.support.loops import assert_same_bits, train, weights_of
from tests.support.models import batch, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, SERIAL, TIGHT, Paging, Same, Setting, plain
from tests.tiling.tiled_models import LIMIT_BYTES, builder, small_gpt, small_llama

LARGE = 2048, 8192
"""Features of a layer of 67 MB."""

LARGE_BUDGET = 40 << 20


def three_steps(model: nn.Module) -> Any:
    """Losses, gradients, and weights after three steps that accumulate and clip."""
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    return vars(train(model, optimizer, steps=3, accumulate=2))


@pytest.mark.parametrize("name", LIMIT_BYTES)
def test_the_numbers_of_the_same_tiles_in_memory(same: Same, name: str) -> None:
    same(builder(name), three_steps, key=f"{name} in tiles")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_activation_checkpoints(same: Same, use_reentrant: bool) -> None:
    same(builder("gpt", checkpointing=use_reentrant), three_steps, key="gpt in tiles")


OTHERS = {
    "resident": RESIDENT,
    "serial": SERIAL,
    "in_backward": replace(TIGHT, step_overlap="in_backward"),
    "speculative": replace(TIGHT, step_overlap="speculative"),
}


@pytest.mark.parametrize("setting", OTHERS.values(), ids=OTHERS)
def test_with_every_way_to_update(paging: Paging, setting: Setting) -> None:
    def run(model: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        losses = []
        for step in range(5):
            loss = next_token_loss(model, batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, weights_of(model)

    build = builder("gpt")
    assert_same_bits(run(plain(build)), run(paging.build(build, setting, key="gpt in tiles")))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(paging: Paging, precision: str) -> None:
    """Losses and gradients before an update; after it, masters differ that the plain model lacks."""
    setting = Setting(precision, 1.6, precision=precision)

    def first(model: nn.Module) -> Any:
        model.train()
        torch.manual_seed(1)
        loss = model(torch.arange(16).view(1, 16)).float().square().mean()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    build = builder("gpt")
    assert_same_bits(first(plain(build, precision=precision)), first(paging.build(build, setting, key="gpt in tiles")))


@pytest.mark.parametrize("features, tokens, limit", [((256, 1024), 64, 256 * 256 * 4), ((192, 1000), 33, 192 * 4 * 64)])
def test_the_forward_has_the_bits_of_the_whole_layer(features: tuple[int, int], tokens: int, limit: int) -> None:
    """And gradients those of it up to rounding: that of the input is a sum over tiles."""
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(*features))
    whole = nn.Linear(*features)
    whole.load_state_dict(holder[0].state_dict())
    assert deepoffload.tile_linear(holder, limit) == ["0"]
    tiles = [len(tile.weight) for tile in holder[0].tiles]
    assert len(tiles) > 1 and sum(tiles) == features[1] and tiles[-1] <= tiles[0] and len(set(tiles[:-1])) == 1
    found = []
    for layer in (whole, holder):
        x = torch.randn(tokens, features[0], generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = layer(x)
        (out * torch.linspace(0, 1, features[1])).sum().backward()
        found.append((out.detach(), x.grad, layer))
    assert_same_bits(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    torch.testing.assert_close(whole.weight.grad, torch.cat([tile.weight.grad for tile in holder[0].tiles]))


def test_a_layer_above_the_budget_trains_in_tiles(tmp_path: Path) -> None:
    """67 MB of weight in 40 MiB."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(*LARGE, bias=False), nn.GELU())

    with pytest.raises(BudgetError, match=r"alone is larger .* deepoffload\.tile_linear\(model, max_bytes=\d+\)"):
        with deepoffload.offload_context(host_budget=LARGE_BUDGET, nvme_path=str(tmp_path)):
            _ = build()
    with deepoffload.offload_context(host_budget=LARGE_BUDGET, nvme_path=str(tmp_path)):
        model: Any = build()
        assert deepoffload.tile_linear(model, "8MiB") == ["0"]
    assert len(model[0].tiles) == 8 and len(units_of(model)) == 8
    reference: Any = build()
    found = []
    for each in (reference, model):
        optimizer = deepoffload.CPUAdamW(each.parameters(), lr=1e-2)
        x = torch.ones(1, LARGE[0]) / 8
        each(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(each(x).detach())
    assert_same_bits(*found)
    assert deepoffload.stats(model)["host_peak_bytes"] <= LARGE_BUDGET


def test_a_layer_that_was_split_gives_its_memory_back_at_once(paging: Paging) -> None:
    with paging.context(RESIDENT, 64 << 20) as context:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        assert context.engine is not None
        arena = tiers_of(context.engine).arena
        before_bytes = arena.used_bytes
        deepoffload.tile_linear(model, "64KiB")
        assert arena.used_bytes <= before_bytes + 4 * 4 * 4096  # tiles end in pages of their own


def test_a_refusal_of_a_model_names_the_call(tmp_path: Path) -> None:
    """The layer itself has room, but not with its gradient and state."""
    with pytest.raises(BudgetError, match=r"largest layer, 0 .* deepoffload\.tile_linear"):
        with deepoffload.offload_context(host_budget="3MiB", nvme_path=str(tmp_path)):
            model: Any = nn.Sequential(nn.Linear(512, 1024))
    with deepoffload.offload_context(host_budget="3MiB", nvme_path=str(tmp_path)):
        model = nn.Sequential(nn.Linear(512, 1024))
        deepoffload.tile_linear(model, "192KiB")
    model(torch.ones(1, 512)).sum().backward()
    with pytest.raises(BudgetError) as refused:  # it is no linear layer that is too large
        with deepoffload.offload_context(host_budget="3MiB", nvme_path=str(tmp_path)):
            model = nn.Sequential(nn.Embedding(512, 1024))
    assert "tile_linear" not in str(refused.value)


def test_names_and_values_of_the_state_dict(paging: Paging) -> None:
    whole = plain(small_gpt)
    model: Any = paging.build(builder("gpt"), TIGHT, key="gpt in tiles")
    expected, state = whole.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    assert_same_bits(dict(expected), {name: value.clone() for name, value in state.items()})
    name = "blocks.0.mlp.0.weight"
    value = state[name]
    assert value.shape == expected[name].shape and value.dtype is torch.float32
    assert_same_bits(expected[name][60:70, 3].contiguous(), value[60:70, 3].clone())  # from two tiles
    assert_same_bits(expected[name].T.contiguous(), value.T.contiguous())
    with torch.no_grad():
        value[63:65].zero_()  # a state dict's value is the weight
    expected[name][63:65] = 0
    assert_same_bits(expected[name], model.state_dict()[name].clone())
    assert_same_bits(expected[name], torch.cat([tile.weight.detach() for tile in model.blocks[0].mlp[0].tiles]))


def test_state_dicts_go_both_ways(paging: Paging, tmp_path: Path) -> None:
    whole, other = plain(small_gpt, seed=1), plain(small_gpt, seed=2)
    model: Any = paging.build(builder("gpt"), EVICTING, key="gpt in tiles")
    assert model.load_state_dict(whole.state_dict()).missing_keys == []
    other.load_state_dict(model.state_dict())
    assert_same_bits(dict(whole.state_dict()), dict(other.state_dict()))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert_same_bits(dict(whole.state_dict()), dict(torch.load(tmp_path / "model.pt")))
    again: Any = paging.build(builder("gpt"), TIGHT, key="gpt in tiles", seed=3)
    again.load_state_dict(model.state_dict())
    assert_same_bits(dict(whole.state_dict()), {name: value.clone() for name, value in again.state_dict().items()})
    lacking = {name: value for name, value in whole.state_dict().items() if name != "blocks.1.mlp.0.bias"}
    assert model.load_state_dict(lacking, strict=False).missing_keys == ["blocks.1.mlp.0.bias"]
    lacking["blocks.1.mlp.0.bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="size mismatch for blocks.1.mlp.0.bias"):
        model.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match="Unexpected.*blocks.0.mlp.0.other"):
        model.load_state_dict({**whole.state_dict(), "blocks.0.mlp.0.other": torch.zeros(1)})


def test_the_weight_of_a_layer_in_tiles() -> None:
    """Code that looks at ``layer.weight`` finds it, and gradients reach the tiles."""
    holder: Any = nn.Sequential(nn.Linear(64, 192))
    deepoffload.tile_linear(holder, 64 * 64 * 4)
    layer = holder[0]
    assert layer.weight.shape == (192, 64) and layer.weight.dtype is torch.float32
    x = rows()
    assert_same_bits(F.linear(x, layer.weight, layer.bias).detach(), layer(x).detach())
    F.linear(x, layer.weight, layer.bias).sum().backward()
    assert all(tile.weight.grad is not None and tile.bias.grad is not None for tile in layer.tiles)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64)
        self.other.weight = self.one.weight


def test_what_cannot_be_split_is_refused_before_anything_changes(paging: Paging) -> None:
    tied = Tied()
    with pytest.raises(UnsupportedError, match="one is tied to other.weight"):
        deepoffload.tile_linear(tied, 1024)
    assert type(tied.one) is nn.Linear and tied.other.weight is tied.one.weight
    with paging.context(RESIDENT, 1 << 20):
        whole = small_gpt()
        with pytest.raises(UnsupportedError, match="tied to .*Embedding"):
            deepoffload.tile_linear(nn.Sequential(whole.head), 4096)  # the model that has the other is known
    hooked = nn.Sequential(nn.Linear(64, 64))
    hooked[0].register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match="0 has hooks"):
        deepoffload.tile_linear(hooked, 1024)
    attention = nn.MultiheadAttention(32, 2)
    with pytest.raises(UnsupportedError, match="out_proj is a NonDynamicallyQuantizableLinear"):
        deepoffload.tile_linear(attention, 1024)
    for given, said in (
        (0, "has to be positive"),
        (-1, "max_bytes"),
        ("much", "max_bytes"),
        (100, "below one row of 0"),
    ):
        with pytest.raises(UsageError, match=said):
            deepoffload.tile_linear(nn.Sequential(nn.Linear(64, 64)), given)
    with pytest.raises(UsageError, match="itself the layer"):
        deepoffload.tile_linear(nn.Linear(64, 64), 1024)
    model = paging.build(small_gpt, TIGHT)
    with pytest.raises(UsageError, match="inside the context"):
        deepoffload.tile_linear(model, 12288)
    same = nn.Sequential(nn.Linear(64, 64))
    assert deepoffload.tile_linear(same, "64MiB") == [] and type(same[0]) is nn.Linear


def test_one_layer_at_two_places_stays_one() -> None:
    layer = nn.Linear(64, 128)
    model = nn.Sequential(layer, nn.Linear(128, 64), layer)
    assert deepoffload.tile_linear(model, 20_000) == ["0", "1", "2"]
    assert isinstance(model[0], LinearInTiles) and model[0] is model[2]


def test_meta_layers_are_split_too() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(64, 128))
    deepoffload.tile_linear(model, 64 * 64 * 4)
    assert model.state_dict()["0.weight"].shape == (128, 64)
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert bool(model[0].tiles[1].weight.isfinite().all())


def test_deepspeeds_signature(paging: Paging) -> None:
    """A grid of tiles, in DeepSpeed's names, with the numbers of the whole layer."""
    whole = nn.Linear(50, 30)

    def build() -> nn.Module:
        tiled = deepspeed.zero.TiledLinear(50, 30, in_splits=3, out_splits=4, init_linear=whole)
        return nn.Sequential(tiled, nn.Linear(30, 4))

    reference, model = plain(build), paging.build(build, TIGHT, key="grid")
    assert [tuple(row[0].weight.shape) for row in reference[0].linears] == [(8, 17), (8, 17), (7, 17), (7, 17)]
    assert [tile.bias is not None for tile in reference[0].linears[0]] == [False, False, True]
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert_same_bits(reference(x).detach(), model(x).detach())
    torch.testing.assert_close(reference[0](x), whole(x))
    parts = deepspeed.zero.TiledLinear(50, 30, True, 2, 2, True, False, init_linear=whole)
    found = parts([x[:, :25], x[:, 25:]])
    torch.testing.assert_close(torch.cat(found, -1), whole(x))
    with pytest.raises(UsageError, match="out_splits=31 has to be between 1 and 30"):
        deepspeed.zero.TiledLinear(50, 30, out_splits=31)
    with pytest.raises(UsageError, match="the given layer a weight"):
        parts.copy_params_from(nn.Linear(30, 50))

    class WithBias(nn.Linear):
        def forward(self, input: Any) -> Any:
            return F.linear(input, self.weight), self.bias

    returning = deepspeed.zero.TiledLinearReturnBias(50, 30, in_splits=2, out_splits=2, linear_cls=WithBias)
    returning.copy_params_from(whole)
    out, bias = returning(x)
    torch.testing.assert_close(out + bias, whole(x))


def test_a_transformers_model_saves_and_loads_in_its_own_names(paging: Paging, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model: Any = paging.build(builder("llama"), TIGHT, key="llama in tiles")
    deepoffload.save_pretrained(model, tmp_path / "out")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    whole = plain(small_llama)
    assert_same_bits(dict(whole.state_dict()), dict(loaded.state_dict()))
    for setting in (RESIDENT, EVICTING):
        again: Any = paging.build(builder("llama"), setting, key="llama in tiles", seed=5)
        assert deepoffload.load_pretrained(again, tmp_path / "out") == ([], [])
        assert_same_bits(dict(whole.state_dict()), {name: v.clone() for name, v in again.state_dict().items()})
    deepoffload.load_pretrained(whole, tmp_path / "out")
