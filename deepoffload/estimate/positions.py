"""How many tokens a model of transformers takes, where it has a row of a table for each position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_sequence_length")
_TABLES = (
    "wpe", "positions_embed", "position_embedding", "position_embeddings", "position_embeds_layer", "embed_positions",
)  # fmt: skip


def longest_sequence(model: Any) -> int | None:
    """The most tokens that the model's tables of positions have rows for; None: it has no such tables, and what its
    configuration says of positions limits nothing (rotary ones)."""
    said = set(stated_limits(model.config.to_dict()))
    return min((rows for rows, taken in _tables(model) if {rows, taken} & said), default=None)


def stated_limits(settings: Mapping[str, Any]) -> Iterator[int]:
    """What a configuration and its parts say of the number of positions."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from stated_limits(value)
        elif key in LIMITS and isinstance(value, int) and value > 0:
            yield value


def _tables(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Of each table: the positions it has rows for, and its rows."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            # OPT and BART begin at row 2, RoBERTa behind the row of its padding
            before = getattr(module, "offset", 0)
            if module.padding_idx is not None:
                before = module.padding_idx + 1
            yield module.num_embeddings - before, module.num_embeddings
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in _TABLES and buffer.dim() == 2:
            yield buffer.shape[0], buffer.shape[0]
