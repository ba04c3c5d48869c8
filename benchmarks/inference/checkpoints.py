"""Checkpoints with random weights, written tensor by tensor: a model may be larger than memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "1.2b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 8},
    "20gb": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 48, "num_attention_heads": 32},
    "experts": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
"""Llama-like models, and a Mixtral-like one."""

SHARD_BYTES = 1 << 30
DEVIATION = 0.02


def _empty_model(size: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A model on the meta device, and the shapes that its checkpoint has."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    has_experts = "num_local_experts" in SIZES[size]
    config_type, model_type = (MixtralConfig, MixtralForCausalLM) if has_experts else (LlamaConfig, LlamaForCausalLM)
    config = config_type(**SIZES[size], num_key_value_heads=8, vocab_size=32_000, max_position_embeddings=32_768)
    config.dtype, config.architectures = "bfloat16", [model_type.__name__]
    with torch.device("meta"):
        model = model_type(config)
        stored = revert_weight_conversion(model, dict(model.state_dict()))
    return model, {name: tuple(tensor.shape) for name, tensor in stored.items()}


def checkpoint_bytes(size: str) -> int:
    """Of the weights."""
    _, shapes = _empty_model(size)
    return sum(2 * math.prod(shape) for shape in shapes.values())


def write_checkpoint(folder: Path, size: str) -> None:
    """In bf16, as the hub has them, in shards of about 1 GiB."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model, shapes = _empty_model(size)
    model.config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))  # AirLLM wants one
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b").save_pretrained(folder)
    torch.manual_seed(0)
    shards = list(_shards(shapes))
    home = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = {}
        for name in names:
            values[name] = torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, DEVIATION)
            if len(shapes[name]) == 1:
                values[name].fill_(1)  # a norm
            home[name] = file
        save_file(values, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for name, shape in shapes.items():
        names.append(name)
        nbytes += 2 * math.prod(shape)
        if nbytes >= SHARD_BYTES:
            yield names
            names, nbytes = [], 0
    if names:
        yield names
