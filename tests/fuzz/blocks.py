"""Kinds of blocks that random models are made of.

Each maps activations of shape (batch, sequence, WIDTH) to the same shape. Together they use weights in all the ways
that ever mattered: whole, as views, twice, by closures, in hooks, in custom functions, under ``no_grad``, not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.functions import KeepsWeight, Recomputes, SavesWeight

WIDTH = 32

BLOCKS: dict[str, Callable[[], nn.Module]] = {}


def block(make: Any) -> Any:
    """Register a class or a function that makes a block, by its name."""
    BLOCKS[make.__name__.strip("_")] = make
    return make


def matrix(rows: int = WIDTH, columns: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))


def vector(size: int = WIDTH, value: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(size) * 0.1 if value is None else torch.full((size,), value))


class WithMatrix(nn.Module):
    """A block with one matrix; what it does with it is the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = matrix()


class WithBoth(WithMatrix):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = vector()


class Wrapped(nn.Module):
    """A module of torch's with a function around it."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


# -- modules of torch --------------------------------------------------------------------------------------------------


@block
def linear() -> nn.Module:
    return Wrapped(nn.Linear(WIDTH, WIDTH), lambda inner, x: x + torch.tanh(inner(x)))


@block
def mlp() -> nn.Module:
    inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return Wrapped(inner, lambda inner, x: x + inner(x))


@block
def attention() -> nn.Module:
    inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    return Wrapped(inner, lambda inner, x: x + inner(x, x, x, need_weights=True)[0])


@block
def lstm() -> nn.Module:
    return Wrapped(nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda inner, x: x + inner(x)[0])


@block
def gru() -> nn.Module:
    return Wrapped(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda inner, x: x + inner(x)[0])


@block
def cell() -> nn.Module:
    def run(inner: nn.Module, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        outputs = []
        for position in range(x.shape[1]):
            state = inner(x[:, position], state)
            outputs.append(state)
        return x + torch.stack(outputs, 1)

    return Wrapped(nn.GRUCell(WIDTH, WIDTH), run)


@block
def convolution() -> nn.Module:
    inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    return Wrapped(inner, lambda inner, x: x + torch.tanh(inner(x.transpose(1, 2)).transpose(1, 2)))


@block
def depthwise() -> nn.Module:
    inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    return Wrapped(inner, lambda inner, x: x + inner(x.transpose(1, 2)).transpose(1, 2))


@block
def group_norm() -> nn.Module:
    return Wrapped(nn.GroupNorm(4, WIDTH), lambda inner, x: x + inner(x.transpose(1, 2)).transpose(1, 2))


@block
def batch_norm() -> nn.Module:
    return Wrapped(nn.BatchNorm1d(WIDTH), lambda inner, x: x + inner(x.transpose(1, 2)).transpose(1, 2))


@block
def prelu() -> nn.Module:
    return Wrapped(nn.PReLU(WIDTH), lambda inner, x: inner(x.transpose(1, 2)).transpose(1, 2))


@block
def bilinear() -> nn.Module:
    return Wrapped(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: x + torch.tanh(inner(x, x)))


@block
def lookup() -> nn.Module:
    return Wrapped(nn.Embedding(WIDTH, WIDTH), lambda inner, x: x + inner(x.argmax(-1)))


@block
def bag() -> nn.Module:
    def run(inner: nn.Module, x: Tensor) -> Tensor:
        return x + inner(x.argmax(-1)).unsqueeze(1)

    return Wrapped(nn.EmbeddingBag(WIDTH, WIDTH, mode="sum"), run)


@block
def dropout() -> nn.Module:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
    return Wrapped(inner, lambda inner, x: x + inner(x))


@block
def weight_norm() -> nn.Module:
    return Wrapped(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), lambda inner, x: x + torch.tanh(inner(x)))


@block
def spectral_norm() -> nn.Module:
    return Wrapped(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), lambda inner, x: x + inner(x))


@block
def frozen() -> nn.Module:
    inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return Wrapped(inner, lambda inner, x: x + torch.tanh(inner(x)))


# -- weights used by hand ----------------------------------------------------------------------------------------------


@block
class plain_matmul(WithBoth):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight + self.bias)


@block
class transposed(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.t())


@block
class both_ways(WithMatrix):
    """One weight, used as it is and transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight) @ self.weight.t()


@block
class product(WithMatrix):
    """Two saves of one weight in one node."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.weight @ self.weight.t()))


@block
class low_rank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = matrix(WIDTH, 4), matrix(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ (self.down @ self.up)


@block
class gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = matrix(WIDTH, 64), matrix(WIDTH, 64), matrix(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


@block
class rms_norm(WithMatrix):
    def __init__(self) -> None:
        super().__init__()
        self.scale = vector(value=1.0)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + (self.scale * normed) @ self.weight


@block
class layer_scale(WithMatrix):
    """ConvNeXt's: a small view that autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = vector(value=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight) * self.gamma.reshape(1, 1, -1)


@block
class fused_projection(nn.Module):
    """Attention over chunks of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = matrix(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (F.linear(x, part) for part in self.qkv.chunk(3))
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True)


@block
class heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH // 4) / math.sqrt(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("btw,hwd->bthd", x, self.weight).flatten(2)


@block
class rows_of(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[..., :16] @ self.weight[:16] * self.weight[3:4].mean()


@block
class picked(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.index_select(0, x.argmax(-1).flatten()).view_as(x)


@block
class summed_up(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.cumsum(0) / WIDTH)


@block
class statistics(WithMatrix):
    """A decision that hangs on a weight's value, and a detached number of it."""

    def forward(self, x: Tensor) -> Tensor:
        if float(self.weight.detach().mean()) > 0:
            x = x * 0.5
        return x + x @ self.weight * self.weight.detach().std()


@block
class scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@block
class three_times(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(x @ self.weight)
        return x


@block
class partly_unused(WithBoth):
    def __init__(self) -> None:
        super().__init__()
        self.spare = matrix()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


# -- structure ---------------------------------------------------------------------------------------------------------


@block
class experts(nn.Module):
    """The best expert of each row; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best, index = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = index == number
            if chosen.any():
                output[chosen] = expert(x[chosen]) * best[chosen].unsqueeze(-1)
        return x + output


@block
class listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(matrix() for _ in range(3))
        self.mix = vector(3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.mix.softmax(0)
        return x + sum(share * torch.tanh(x @ weight) for share, weight in zip(shares, self.weights, strict=True))


@block
class by_name(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"a": matrix(), "b": vector()})

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weights["a"], self.weights["b"]))


@block
class of_the_child(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(x), self.child.weight) + self.child(x)


@block
class named_outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        return x + found["a"] * found["rest"][0].sigmoid()


class Named(WithBoth):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x @ self.weight, "rest": (x + self.bias,)}


@block
class adapter(nn.Module):
    """LoRA by hand: a frozen weight and a trained pair."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


@block
class sometimes(WithMatrix):
    """Layer drop."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < 0.5:
            return x
        return x + torch.tanh(x @ self.weight)


# -- what runs inside backward, or behind a checkpoint -----------------------------------------------------------------


@block
class saves_weight(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + SavesWeight.apply(x, self.weight)


@block
class keeps_weight(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + KeepsWeight.apply(x, self.weight)


@block
class recomputes(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + Recomputes.apply(x, self.weight)


@block
class hook_reads_weight(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * self.weight.detach().abs().mean())
        return x + torch.tanh(hidden)


@block
class checkpointed_closure(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda value: torch.tanh(value @ self.weight), x, use_reentrant=False)


@block
class reentrant_closure(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda value: torch.tanh(value @ self.weight), x, use_reentrant=True)


@block
class checkpointed_child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.child, x, use_reentrant=False)


@block
class casts(WithBoth):
    """Autocast inside a model in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.linear(x, self.weight, self.bias)
        return x + torch.tanh(hidden.to(x.dtype))


# -- state that changes in forward -------------------------------------------------------------------------------------


@block
class running_mean(WithMatrix):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        return x + torch.tanh((x - self.mean) @ self.weight)


@block
class clamps_itself(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1.0, 1.0)
        return x + torch.tanh(x @ self.weight)


@block
class clamps_data(WithMatrix):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1.0, 1.0)
        return x + torch.tanh(x @ self.weight)


@block
class edits_activation(WithMatrix):
    """In-place operations that autograd allows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.weight).relu_()
        hidden = hidden.clone().mul_(0.5)
        return hidden.add_(x)


@block
class edits_what_is_saved(WithMatrix):
    """In-place operations that autograd refuses in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(x @ self.weight)
        return hidden.add_(x)
