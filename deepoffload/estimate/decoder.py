"""A decoder-only transformer by its sizes: what stands for a model of which only numbers are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import positive_integer
from deepoffload.tiling.loss import tiled_loss

DEFAULT_VOCABULARY = 32_000


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder. ``gated``: three matrices in the perceptron (Llama), not two (GPT). ``positions``: rows of a
    learned table of positions; 0 for none. ``experts``: gated perceptrons in each layer, of which each token uses
    ``experts_per_token``; 0: one perceptron, which all use. ``expert_inner``, ``shared_inner``: the width of an expert,
    where it is not ``intermediate``, and of one more that all tokens use."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = DEFAULT_VOCABULARY
    intermediate: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    biased: bool = False
    tied: bool = True
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary"):
            positive_integer(name, getattr(self, name))
        optional = ("experts", "experts_per_token", "expert_inner", "shared_inner")
        for name in ("intermediate", "kv_heads", "head_width", "positions", *optional):
            if getattr(self, name):
                positive_integer(name, getattr(self, name))
        if not self.head_width and self.hidden % self.heads:
            raise ConfigError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.experts_per_token > self.experts:
            raise ConfigError(f"a token cannot use {self.experts_per_token} of {self.experts} experts")
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def inner(self) -> int:
        """Width between the matrices of the perceptron."""
        return self.intermediate or 4 * self.hidden

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_width or self.hidden // self.heads


def shape_of_count(
    parameters: int, layers: int, hidden: int, *, vocabulary: int = DEFAULT_VOCABULARY, heads: int | None = None
) -> DecoderShape:
    """The decoder with ``layers`` of ``hidden`` that has about ``parameters`` weights: the perceptron takes what the
    embedding (tied to the head) and the attention leave.

    Raises:
        ConfigError: not a positive whole number, or too few parameters for these sizes.
    """
    for name, value in (("parameters", parameters), ("layers", layers), ("hidden", hidden), ("vocabulary", vocabulary)):
        positive_integer(name, value)
    heads = positive_integer("heads", heads) if heads is not None else _usual_heads(hidden)
    fixed = hidden * (vocabulary + 1) + layers * hidden * (4 * hidden + 2)
    inner = round((parameters - fixed) / (2 * hidden * layers))
    if inner < 1:
        raise ConfigError(
            f"parameters {parameters} are too few for {layers} layers of hidden size {hidden} with a vocabulary of "
            f"{vocabulary}: embedding, norms and attention alone have {fixed}; give fewer layers or a smaller size"
        )
    return DecoderShape(layers, hidden, heads, vocabulary, intermediate=inner)


def _usual_heads(hidden: int) -> int:
    """Heads of 128 or 64, where that divides the hidden size."""
    for width in (128, 64, 32, 16, 8, 4, 2):
        if hidden % width == 0:
            return hidden // width
    return 1


class _Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads or shape.heads, shape.width
        self.q = nn.Linear(shape.hidden, self.heads * self.width, bias=shape.biased)
        self.k = nn.Linear(shape.hidden, self.kv_heads * self.width, bias=shape.biased)
        self.v = nn.Linear(shape.hidden, self.kv_heads * self.width, bias=shape.biased)
        self.out = nn.Linear(self.heads * self.width, shape.hidden, bias=shape.biased)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.width))


class _Experts(nn.Module):
    """Gated perceptrons behind a router, in two parameters, and perhaps one that all tokens use. Every expert gets as
    many tokens as every other: how many it really gets depends on the data."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        count, inner = shape.experts, shape.expert_inner or shape.inner
        self.count, self.per_token = count, shape.experts_per_token
        self.router = nn.Linear(shape.hidden, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, shape.hidden))
        self.down = nn.Parameter(torch.empty(count, shape.hidden, inner))
        self.shared = _Perceptron(shape, shape.shared_inner) if shape.shared_inner else None
        self.shared_gate = nn.Linear(shape.hidden, 1, bias=False) if shape.shared_inner else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, _ = self.router(tokens).softmax(-1).topk(self.per_token)
        rows = -(-len(tokens) * self.per_token // self.count)
        sent = tokens.repeat_interleave(self.per_token, 0)
        sent = F.pad(sent, (0, 0, 0, rows * self.count - len(sent))).view(self.count, rows, -1)
        gate, up = torch.bmm(sent, self.gate_up.transpose(1, 2)).chunk(2, -1)
        done = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2)).flatten(0, 1)
        done = done[: len(tokens) * self.per_token].view(len(tokens), self.per_token, -1)
        y = (done * shares.unsqueeze(-1)).sum(1)
        if self.shared is not None and self.shared_gate is not None:
            y = y + self.shared_gate(tokens).sigmoid() * self.shared(tokens)
        return y.view_as(x)


class _Perceptron(nn.Module):
    def __init__(self, shape: DecoderShape, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, inner, bias=shape.biased) if shape.gated else None
        self.up = nn.Linear(shape.hidden, inner, bias=shape.biased)
        self.down = nn.Linear(inner, shape.hidden, bias=shape.biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class _DecoderLayer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.hidden, bias=shape.biased)
        self.attention = _Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.hidden, bias=shape.biased)
        self.perceptron = _Experts(shape) if shape.experts else _Perceptron(shape, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.perceptron(self.norm_2(x))


class Decoder(nn.Module):
    """``(batch, length)`` tokens to the mean loss against the same tokens. An estimate builds it on the meta device.

    Args:
        checkpointing: recompute each layer's activations in backward instead of keeping them.
        tiled: compute the loss in tiles of tokens.
    """

    def __init__(self, shape: DecoderShape, *, checkpointing: bool = False, tiled: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.tiled = tiled
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList(_DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.biased)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        if self.tiled:
            return tiled_loss(self.norm(x), self.head.weight, tokens)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
