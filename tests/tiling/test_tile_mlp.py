"""MLPs that compute a sequence in parts: the numbers of the same parts in plain PyTorch, and weights fetched once."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.support.inspect import reads_of
from tests.support.loops import assert_same_bits, train
from tests.support.models import TinyGPT, batch, llama, mixtral, next_token_loss
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same, plain
from tests.tiling.tiled_models import SMALLER

NAMED: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "gpt": (TinyGPT, ["mlp"]),
    "llama": (llama, None),
    "mixtral": (mixtral, "experts"),
}
"""Models, and the modules that are MLPs."""


def with_tiles(name: str, tiles: int = 3, **changes: Any) -> nn.Module:
    build, modules = NAMED[name]
    model = build(**{**SMALLER[name], **changes})
    assert deepoffload.tile_mlp(model, tiles, modules)
    return model


def three_steps(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    return vars(train(model, optimizer, steps=3, accumulate=2))


@pytest.mark.parametrize(
    "name, changes", [("gpt", {}), ("gpt", {"checkpointing": False}), ("llama", {}), ("mixtral", {})]
)
def test_the_numbers_of_the_same_parts_in_memory(same: Same, name: str, changes: dict[str, Any]) -> None:
    same(partial(with_tiles, name, **changes), three_steps, key=(name, "parts"))


def test_with_layers_in_tiles_too(same: Same) -> None:
    """Both at once, and the loss, with updates in backward."""

    def build() -> nn.Module:
        model: Any = with_tiles("llama")
        deepoffload.tile_linear(model, 8192)
        deepoffload.tile_loss(model, 4096)
        return model

    def program(model: Any) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            loss = model(input_ids=batch(step), labels=batch(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, [param.detach().clone() for param in model.parameters()]

    same(build, program, key="all of it")


@pytest.mark.parametrize("where", ["inside", "afterwards"])
def test_with_everything_in_memory(paging: Paging, where: str) -> None:
    """One window is then around the whole model, and the parts run again outside of it."""
    build, modules = NAMED["gpt"]
    small = partial(build, **SMALLER["gpt"])
    paged = paging.build(partial(with_tiles, "gpt") if where == "inside" else small, RESIDENT)
    torch.manual_seed(1)
    if where == "afterwards":
        next_token_loss(paged, batch(0)).backward()
        paged.zero_grad()
        deepoffload.tile_mlp(paged, 3, modules)
    found = []
    for model in (plain(partial(with_tiles, "gpt")), paged):
        torch.manual_seed(1)
        found.append(three_steps(model))
    assert_same_bits(*found)


def test_the_forward_of_the_whole_sequence(paging: Paging) -> None:
    """One part has its bits, and names and classes stay. Gradients are sums over parts."""
    found = []
    for tiles in (None, 1, 4):
        model = plain(partial(with_tiles, "llama", tiles)) if tiles else plain(lambda: llama(**SMALLER["llama"]))
        model.eval()
        loss = next_token_loss(model, batch(0))
        loss.backward()
        found.append((loss.detach(), [param.grad for param in model.parameters()], model))
    whole, one, four = found
    assert_same_bits(whole[:2], one[:2])
    assert_same_bits(whole[0], four[0])
    torch.testing.assert_close(whole[1], four[1])
    assert list(whole[2].state_dict()) == list(four[2].state_dict())
    assert isinstance(four[2].model.layers[0].mlp, type(whole[2].model.layers[0].mlp))
    for copied in (copy.deepcopy(four[2]), pickle.loads(pickle.dumps(four[2]))):
        again = next_token_loss(copied, batch(0)).detach()
        assert_same_bits(four[0], again)
        assert type(copied.model.layers[0].mlp).num_tiles == 4


class Wide(nn.Module):
    """An MLP that is a large part of a small budget, between layers that leave it no room while they run."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.before = nn.Linear(96, 96)
        self.mlp = nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))
        self.after = nn.Linear(96, 96)
        if tiles > 1:
            deepoffload.tile_mlp(self, tiles, modules="mlp")

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mlp(self.before(x)))


def test_weights_are_fetched_once_for_all_parts(paging: Paging) -> None:
    found = []
    for tiles in (2, 10):
        model: Any = paging.build(partial(Wide, tiles), TIGHT, key="wide", timeline=True)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            begin = time.perf_counter()
            model(torch.ones(1, 40, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([sum(at > begin for at in reads_of(layer.weight)) for layer in (model.mlp[0], model.mlp[2])])
    for of_two_parts, of_ten in zip(*found, strict=True):
        assert 0 < of_ten <= of_two_parts + 1, found  # what stays in memory may differ by a block


def test_without_gradients_and_with_few_tokens(paging: Paging) -> None:
    model = paging.build(partial(with_tiles, "gpt", 50), EVICTING, key=("gpt", "parts"))
    reference = plain(partial(with_tiles, "gpt", 50))
    with torch.no_grad():
        for length in (16, 1):
            assert_same_bits(reference.eval()(batch(0)[:, :length]), model.eval()(batch(0)[:, :length]))


class Mixing(nn.Module):
    """Looks at all tokens, or wants more than one tensor."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.result = result

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        y = self.layer(x)
        return (y, y) if self.result == "two" else y.mean(-2)


class Stacked(nn.Module):
    """Experts that get their tokens one after the other: which expert a token is for depends on its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.view(2, -1, 8), self.weights).view(-1, 8)


def test_experts_keep_the_router_whole() -> None:
    """What the router puts out, and the loss that balances experts, are those of all tokens."""
    found = []
    for tiles in (1, 3):
        model: Any = plain(partial(with_tiles, "mixtral", tiles, output_router_logits=True)).eval()
        out = model(input_ids=batch(0), labels=batch(0))
        found.append((out.router_logits, out.aux_loss.detach(), out.loss.detach()))
    assert_same_bits(found[0][:2], found[1][:2])
    torch.testing.assert_close(found[0][2], found[1][2])


class Adding(nn.Module):
    """As the MLPs of Bloom and MPT: the residual comes along, here by name, with a weight for each token."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.before = nn.Linear(12, 12)
        self.mlp = AddingMLP()
        deepoffload.tile_mlp(self, tiles)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        found: Tensor = self.mlp(y, x, share=y.mean(-1), twice=True)
        return self.mlp(states=found, residual=y, share=y[..., :1].sum(-1))


class AddingMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, states: Tensor, residual: Tensor, share: Tensor, twice: bool = False) -> Tensor:
        return residual + self.down(self.up(states).relu()) * share.unsqueeze(-1) * (2 if twice else 1)


def test_other_tensors_of_a_call_are_cut_with_the_tokens(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(5):
            x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(step))
            for shape in ((2, 7, 12), (14, 12), (1, 2, 7, 12)):
                loss = model(x.view(shape)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [param.detach().clone() for param in model.parameters()]

    same(partial(Adding, 3), program, key="adding")
    whole, parts = (plain(partial(Adding, tiles)) for tiles in (1, 3))
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(whole(x), parts(x))


def test_what_cannot_be_cut_is_refused() -> None:
    for tiles in (0, -1, 2.0, True):
        with pytest.raises(UsageError, match="tiles=.* has to be a whole number from 1 on"):
            deepoffload.tile_mlp(llama(), tiles)
    with pytest.raises(UsageError, match=r"TinyGPT has no module whose class is called \.\.\.MLP"):
        deepoffload.tile_mlp(TinyGPT())
    with pytest.raises(UsageError, match="no module that .*nothing.* names"):
        deepoffload.tile_mlp(llama(), modules=["nothing"])
    with pytest.raises(UsageError, match="takes names and classes of modules, not 3"):
        deepoffload.tile_mlp(llama(), modules=[3])
    with pytest.raises(UsageError, match="blocks.0.mlp is part of blocks.0"):
        deepoffload.tile_mlp(TinyGPT(), modules=["mlp", "blocks.0"])
    for layer in (nn.TransformerDecoderLayer(8, 2), nn.LSTM(8, 8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)):
        mixing = nn.ModuleDict({"mlp": nn.Linear(8, 8), "other": nn.ModuleDict({"mlp": nn.Sequential(layer)})})
        with pytest.raises(UnsupportedError, match=r"other\.mlp has \w+, which looks at several tokens"):
            deepoffload.tile_mlp(mixing, 2, "mlp")
        assert type(mixing["mlp"]) is nn.Linear, "nothing has been changed"
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn has LlamaAttention"):
        deepoffload.tile_mlp(llama(**SMALLER["llama"]), 2, ["self_attn"])
    deepoffload.tile_mlp(nn.Sequential(nn.Conv1d(8, 8, 1)), 2, "0")
    model = with_tiles("llama")
    with pytest.raises(UsageError, match="in tiles already"):
        deepoffload.tile_mlp(model)
    with pytest.raises(UsageError, match="takes a torch.nn.Module"):
        deepoffload.tile_mlp("model")
    x = torch.ones(1, 4, 8)
    ways = (
        *((Mixing("two"), given) for given in ((x,), (x, x), (x[0], x), (x, x[:, :1]), (x, x[0]), (x, [x]), ())),
        (Mixing("mean"), (x,)),
    )
    for module, given in (*ways, (Stacked(), (x[0],))):
        holder = nn.ModuleDict({"it": module})
        deepoffload.tile_mlp(holder, 2, modules=(Mixing, Stacked))
        with pytest.raises(UnsupportedError, match=r"tile_mlp: (Mixing|Stacked) .* leave this module out"):
            holder["it"](*given)
