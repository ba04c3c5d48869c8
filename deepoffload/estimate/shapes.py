"""A decoder's sizes out of a configuration file, without the program that it belongs to.

What cannot be counted so is refused with the reason: a number that is wrong by a factor of ten is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.decoder import DecoderShape

_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size", "vocabulary_size"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "num_selected_experts"),
    "expert_inner": ("moe_intermediate_size",),
    "shared_inner": ("shared_expert_intermediate_size",),
}
"""Our names of a decoder's sizes, and what configuration files call them."""

_LEARNED_POSITIONS = ("n_positions",)
_GATED = ("silu", "swish", "swiglu", "geglu", "reglu")
_GATED_FAMILIES = ("gemma",)
"""Model types whose gate has another function than its name in ``hidden_act`` tells."""
_GATED_BY_DEFAULT = ("llama", "mistral", "mixtral", "ministral", "qwen", "olmo", "phi3", "cohere", "smollm")
"""Model types that have a gate where ``hidden_act`` is not there: transformers' defaults."""

_NOT_COUNTED = {
    "is_encoder_decoder": "an encoder and a decoder",
    "encoder_layers": "an encoder and a decoder",
    "text_config": "parts for text and for pictures or sound",
    "vision_config": "parts for text and for pictures or sound",
    "audio_config": "parts for text and for pictures or sound",
    "kv_lora_rank": "attention with latent keys and values",
    "state_size": "a state-space model",
    "ssm_cfg": "a state-space model",
    "mamba_d_state": "layers with state spaces",
    "linear_num_value_heads": "layers with linear attention",
    "layers_block_type": "layers of several sorts",
    "block_types": "layers of several sorts",
    "hybrid_override_pattern": "layers of several sorts",
    "first_k_dense_replace": "dense layers before those with experts",
    "mlp_only_layers": "dense layers between those with experts",
    "n_shared_experts": "shared experts in numbers",
    "multi_query": "one key and value for all heads",
    "embedding_size": "an embedding of another width",
    "word_embed_proj_dim": "an embedding of another width",
}


def shape_in(settings: Mapping[str, Any], file: Path) -> tuple[DecoderShape, tuple[str, ...]]:
    """The decoder with the sizes in ``settings``: gated perceptrons, grouped attention and experts are counted. And
    what ``settings`` do not say, so that it was assumed.

    Raises:
        ConfigError: a size is missing or makes no sense, or the model is no decoder of equal layers.
    """
    _refuse(settings, file)
    sizes: dict[str, int] = {}
    for ours, theirs in _FIELDS.items():
        found = next((key for key in theirs if settings.get(key) is not None), None)
        if found is not None:
            sizes[ours] = positive_integer(f"{file}: {found}", settings[found])
        elif ours in ("layers", "hidden", "vocabulary"):
            raise ConfigError(
                f"{file}: has no {theirs[0]} (nor {', '.join(theirs[1:])}); give parameters, layers and hidden size"
            )
    if "experts" in sizes and "experts_per_token" not in sizes:
        raise ConfigError(f"{file}: has experts and no num_experts_per_tok, so their work is not known")
    sizes.setdefault("heads", max(1, sizes["hidden"] // 64))
    positions = next(
        (positive_integer(f"{file}: {key}", settings[key]) for key in _LEARNED_POSITIONS if settings.get(key)), 0
    )
    activation = str(settings.get("hidden_act") or settings.get("activation_function") or "")
    family = str(settings.get("model_type", ""))
    gated = activation in _GATED or family.startswith(_GATED_FAMILIES)
    gated = gated or (not activation and family.startswith(_GATED_BY_DEFAULT))
    tied = bool(settings.get("tie_word_embeddings", True))
    shape = DecoderShape(**sizes, gated=gated, tied=tied, positions=positions, biased=not gated)
    return shape, _assumed(settings, shape, activation)


def _assumed(settings: Mapping[str, Any], shape: DecoderShape, activation: str) -> tuple[str, ...]:
    """What the count takes for granted."""
    because = f"hidden_act is {activation!r}" if activation else "there is no hidden_act"
    perceptrons = "three matrices" if shape.gated else "two matrices"
    biases = "with biases" if shape.biased else "without biases"
    assumed = [f"perceptrons of {perceptrons}, linear layers {biases} ({because})"]
    if settings.get("tie_word_embeddings") is None:
        assumed.append("the head shares the embedding's weights (there is no tie_word_embeddings)")
    if not _says(settings, "heads"):
        assumed.append(f"{shape.heads} heads (there is no num_attention_heads)")
    if not _says(settings, "kv_heads"):
        assumed.append("as many heads of keys and values as of queries (there is no num_key_value_heads)")
    if not _says(settings, "intermediate"):
        assumed.append(f"perceptrons 4 x hidden size wide, {shape.inner} (there is no intermediate_size)")
    if not shape.positions:
        assumed.append("no learned positions (there is no n_positions)")
    return tuple(assumed)


def _says(settings: Mapping[str, Any], ours: str) -> bool:
    return any(settings.get(key) is not None for key in _FIELDS[ours])


def _refuse(settings: Mapping[str, Any], file: Path) -> None:
    reasons = [f"{what} ({key})" for key, what in _NOT_COUNTED.items() if settings.get(key)]
    if settings.get("decoder_sparse_step", 1) != 1 or settings.get("moe_layer_freq", 1) != 1:
        reasons.append("dense layers between those with experts (decoder_sparse_step, moe_layer_freq)")
    unknown = [key for key in settings if "expert" in key and key.startswith(("num", "n_")) and not _known(key)]
    reasons += [f"experts of a sort that is not known ({key})" for key in unknown if settings[key]]
    if reasons:
        raise ConfigError(
            f"{file}: cannot be counted by its sizes alone: it has {', '.join(dict.fromkeys(reasons))}. Install a "
            "version of transformers that builds it, or give parameters, layers and hidden size"
        )


def _known(key: str) -> bool:
    return key in _NOT_COUNTED or any(key in theirs for theirs in _FIELDS.values())
