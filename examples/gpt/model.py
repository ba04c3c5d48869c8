"""A decoder-only transformer over bytes: ordinary PyTorch, with nothing in it that knows of offloading."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """Hidden size and number of layers."""

    hidden: int
    layers: int

    def num_parameters(self, seq: int) -> int:
        """Weights of the model for sequences of up to ``seq`` bytes."""
        block = 12 * self.hidden**2 + 2 * self.hidden
        return self.layers * block + (VOCABULARY + seq + 1) * self.hidden


SIZES = {
    "10m": Shape(320, 8),
    "125m": Shape(768, 18),
    "320m": Shape(1024, 25),
    "1.2b": Shape(2048, 24),
}


class Attention(nn.Module):
    """Causal self-attention. ``(batch, seq, hidden)`` in and out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        heads = self.qkv(x).view(batch, seq, 3, hidden // HEAD_DIM, HEAD_DIM).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """One layer: attention and a perceptron, each behind a norm, with a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden, bias=False)
        self.attention = Attention(hidden)
        self.norm_2 = nn.LayerNorm(hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """The model; the head is tied to the embedding.

    Args:
        shape: its size.
        seq: the longest sequence, in bytes.
        checkpointing: recompute each layer's activations in backward instead of keeping them.
    """

    def __init__(self, shape: Shape, seq: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.seq = seq
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.position = nn.Embedding(seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape.hidden) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: residual branches start smaller, so that their sum does not grow with depth."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and module is not self.head:
                residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / (math.sqrt(2 * layers) if residual else 1.0))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits ``(batch, seq, 256)``, or with ``targets`` (as ``tokens``) the mean loss in nats per byte."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        logits = self.head(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """``num_bytes`` that continue ``prompt``, each drawn from the model."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.seq :])[:, -1]
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())
