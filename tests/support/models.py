"""Small models that the tests train: a GPT of our own, and transformers' with tiny random configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 64
CONTEXT = 16


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    """A decoder with tied embedding, a positional table that belongs to the root, and dropout.

    Args:
        checkpointing: None, or ``use_reentrant`` of the activation checkpoint around every block.
    """

    def __init__(
        self,
        *,
        width: int = 48,
        depth: int = 4,
        num_heads: int = 4,
        dropout: float = 0.1,
        checkpointing: bool | None = None,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, num_heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.head(self.norm(x))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 has tied embeddings, dropout everywhere, and weights that are used transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | changes)))


def mixtral(**changes: Any) -> nn.Module:
    """Mixtral's experts are slices of one parameter, and which of them are used depends on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
    }
    return MixtralForCausalLM(MixtralConfig(**(settings | changes)))


TRANSFORMERS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}
FAMILIES = {"gpt": TinyGPT} | TRANSFORMERS


def batch(seed: int, *, rows: int = 2) -> Tensor:
    """Random tokens, the same for the same seed."""
    return torch.randint(3, VOCABULARY, (rows, CONTEXT), generator=torch.Generator().manual_seed(seed))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, in fp32, of any model here."""
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def mlp(width: int = 64, depth: int = 6) -> nn.Sequential:
    """Linear layers with different activations between them."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh() if index % 2 else nn.GELU()]
    return nn.Sequential(*layers)


def rows(count: int = 4, width: int = 64, *, seed: int = 3) -> Tensor:
    """Random input of :func:`mlp`, the same for the same seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
