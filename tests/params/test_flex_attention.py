"""FlexAttention under paging: block masks in the forward. Where torch has no backward, the same mask as a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import deepoffload
from deepoffload.config import parse_config
from deepoffload.errors import ConfigError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.paging import RESIDENT, TIGHT, Paging, Same, plain

WIDTH, HEADS, TOKENS, WINDOW, BLOCK = 48, 4, 64, 20, 16
DOCUMENTS = torch.arange(TOKENS) // 40
"""Two texts in one sequence."""


def in_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < WINDOW) & (DOCUMENTS[q] == DOCUMENTS[kv])


class Sparse(nn.Module):
    """``dense``: with the mask as one tensor, which every kernel takes. ``direct``: the score looks at a weight."""

    def __init__(self, *, dense: bool, direct: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.slope = nn.Parameter(torch.rand(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dense, self.direct = dense, direct

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.dense:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            slope = self.slope if self.direct else self.slope.clone()

            def falling(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return score - slope[h] * (q - kv)

            y = flex_attention(q, k, v, score_mod=falling, block_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Layers(nn.Module):
    def __init__(self, *, dense: bool = False, direct: bool = False, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sparse(dense=dense, direct=direct) for _ in range(depth)])
        self.dense = dense

    def mask(self) -> BlockMask | Tensor:
        make: Any = create_mask if self.dense else partial(create_block_mask, BLOCK_SIZE=BLOCK)
        made: BlockMask | Tensor = make(in_window, None, None, TOKENS, TOKENS, device="cpu")
        return made

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask()
        for layer in self.layers:
            x = layer(x, mask)
        return x


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def forwards(model: nn.Module) -> list[Tensor]:
    return [model(inputs(seed)) for seed in range(3)]


def test_the_forward_has_the_bits_of_the_plain_model(same: Same) -> None:
    assert Layers().mask().sparsity() > 40  # type: ignore[operator]  # of the blocks, in percent, nobody computes
    same(Layers, forwards, key="flex attention")


def test_a_score_that_looks_at_a_weight(paging: Paging) -> None:
    """Works where the layer is one unit; the error of a layer that is split says what to write."""
    build = partial(Layers, direct=True)
    expected = forwards(plain(build))
    assert_same_bits(expected, forwards(paging.build(build, RESIDENT)))
    with pytest.raises(RuntimeError, match=r"the bytes of a paged weight come and go.*weight\.clone\(\)"):
        forwards(paging.build(build, TIGHT))


def test_training_on_a_cpu(paging: Paging) -> None:
    """torch's error, which changes nothing: the model trains afterwards with the same mask as a tensor."""
    found = []
    for paged in (False, True):
        build = partial(Layers, dense=True)
        model = paging.build(build, TIGHT, key="dense") if paged else plain(build)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(5):
            if step == 2:
                for layer in model.layers:
                    layer.dense = False
                model.dense = False
                with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
                    model(inputs(step))
                for layer in model.layers:
                    layer.dense = True
                model.dense = True
            loss = model(inputs(step)).square().mean()
            loss.backward()
            losses.append((loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, weights_of(model)))
    assert_same_bits(*found)


def test_deepspeeds_key_names_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"sparse_attention.*FlexAttention.*docs/long_sequences\.md"):
        parse_config({"host_budget": "1MiB", "sparse_attention": {"mode": "fixed", "block": 16}})
