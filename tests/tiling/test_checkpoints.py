"""Training states of models in tiles are those of the models: they go from tiles to whole layers, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.training_state import TrainingState
from deepoffload.errors import UnsupportedError
from tests.support.loops import assert_same_bits, train, weights_of
from tests.support.models import TinyGPT
from tests.support.paging import TIGHT, Paging, plain

LIMITS = {"whole": None, "tiles": 12288, "other tiles": 7000}
PAIRS = [("tiles", "whole"), ("whole", "tiles"), ("tiles", "other tiles"), ("tiles", "tiles")]


def gpt(limit: int | None) -> nn.Module:
    """With a separate head, so that it may be split."""
    model = TinyGPT(dropout=0.0, depth=1)
    model.head.weight = nn.Parameter(torch.randn(64, 48) * 0.1)
    if limit is not None:
        deepoffload.tile_linear(model, limit)
    return model


def made(paging: Paging, which: str, **arguments: Any) -> tuple[nn.Module, Any]:
    setting = replace(TIGHT, precision=arguments.pop("precision", "keep"))
    model = paging.build(lambda: gpt(LIMITS[which]), setting, key=("gpt", which))
    return model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2, **arguments)


def all_of(model: nn.Module, optimizer: Any) -> Any:
    """Weights and optimizer state, in the names and shapes of whole layers."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = [
        {key: torch.as_tensor(value).clone() for key, value in optimizer.state_dict()["state"][number].items()}
        for number in range(len(list(model.parameters())))
    ]
    found: dict[str, dict[str, Any]] = {}
    for (name, _), state in zip(model.named_parameters(), states, strict=True):
        before, tile, after = name.partition(".tiles.")
        layer = f"{before}.{after.partition('.')[2]}" if tile else name
        for key, value in state.items():
            found.setdefault(layer, {}).setdefault(key, []).append(value)
    joined = {
        name: {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in sorted(state.items())}
        for name, state in found.items()
    }
    return values, joined


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("one, other", PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_from_one_to_the_other(paging: Paging, tmp_path: Path, one: str, other: str, precision: str) -> None:
    model, optimizer = made(paging, one, precision=precision)
    train(model, optimizer, steps=2)
    TrainingState(model, optimizer).save(tmp_path)
    expected = all_of(model, optimizer)
    again, its_optimizer = made(paging, other, precision=precision)
    state = TrainingState(again, its_optimizer)
    assert state.load(tmp_path).step == 2
    assert_same_bits(expected, all_of(again, its_optimizer))
    train(again, its_optimizer, steps=1)


def test_a_resumed_run_has_the_bits_of_one_that_went_on(paging: Paging, tmp_path: Path) -> None:
    model, optimizer = made(paging, "tiles")
    train(model, optimizer, steps=2)
    TrainingState(model, optimizer).save(tmp_path)
    train(model, optimizer, steps=2, seed=9)
    again, its_optimizer = made(paging, "tiles")
    TrainingState(again, its_optimizer).load(tmp_path)
    train(again, its_optimizer, steps=2, seed=9)
    assert_same_bits(weights_of(model), weights_of(again))


def test_torchs_optimizer_and_a_model_in_memory(paging: Paging, tmp_path: Path) -> None:
    """State that lies in no piece goes under the layer's names, too."""
    model, _ = made(paging, "tiles")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer, steps=2)
    TrainingState(model, optimizer).save(tmp_path)
    for limit in (None, LIMITS["other tiles"]):
        again = plain(lambda limit=limit: gpt(limit))
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2, foreach=False)
        TrainingState(again, its_optimizer).load(tmp_path)
        assert_same_bits(all_of(model, optimizer), all_of(again, its_optimizer))


def test_state_of_8_bits(paging: Paging, tmp_path: Path) -> None:
    """Where tiles are whole blocks of it; else the save says what to do."""

    def made(rows: int | None) -> tuple[Any, Any]:
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(48, 512), nn.Tanh(), nn.Linear(512, 4))
            if rows is not None:
                assert deepoffload.tile_linear(model, 48 * 4 * rows) == ["0"] and len(model[0].tiles) == 512 // rows
            return model

        model = paging.build(build, TIGHT, key=("wide", rows))
        return model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2, state_dtype="8bit")

    def trained(rows: int) -> tuple[Any, Any]:
        model, optimizer = made(rows)
        model(torch.ones(2, 48)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(256)
    TrainingState(model, optimizer).save(tmp_path)
    for rows in (None, 256):
        again, its_optimizer = made(rows)
        TrainingState(again, its_optimizer).load(tmp_path)
        assert_same_bits(all_of(model, optimizer), all_of(again, its_optimizer))
    with pytest.raises(UnsupportedError, match="a tile of 0.bias .* larger max_bytes"):
        TrainingState(*trained(64)).save(tmp_path)


def test_what_a_tile_alone_has_is_refused(paging: Paging, tmp_path: Path) -> None:
    model: Any
    model, _ = made(paging, "tiles")
    tiles = model.blocks[0].mlp[0].tiles
    others = [param for param in model.parameters() if param is not tiles[0].weight]
    optimizer = deepoffload.CPUAdamW([{"params": [tiles[0].weight]}, {"params": others}], lr=1e-2)
    train(model, optimizer, steps=1)
    with pytest.raises(UnsupportedError, match="tiles of blocks.0.mlp.0.weight are in different groups"):
        TrainingState(model, optimizer).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_durable_steps(tmp_path: Path) -> None:
    """They hold the tiles as they are, for the same program to resume."""

    def run(steps: int) -> Any:
        durability = {"every": 1, "path": str(tmp_path)}
        with deepoffload.offload_context(host_budget="1MiB", nvme_path=str(tmp_path), durability=durability) as context:
            torch.manual_seed(0)
            model = gpt(LIMITS["tiles"])
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        state = TrainingState(model, optimizer)
        done = state.resume()
        for step in range(done, steps):
            train(model, optimizer, steps=1, seed=step)
            state.commit(wait=True)
        kept = weights_of(model)
        assert context.engine is not None
        context.engine.close()
        return done, kept

    first, expected = run(2)
    again, kept = run(2)
    assert (first, again) == (0, 2)
    assert_same_bits(expected, kept)
