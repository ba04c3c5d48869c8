"""More families of transformers, for the rows of the matrix that one model goes through in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models.zoo import HEADS, SIZES, TOKENS, VOCABULARY, Family, Inputs, language, noise, tokens

GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}


def decoder(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds a class of transformers from a small configuration."""

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(
            getattr(transformers, config)(**{**SIZES, **HEADS, **TOKENS, **settings})
        )
        return made

    return build


def latent_attention_experts() -> nn.Module:
    low_rank = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    return decoder("DeepseekV3ForCausalLM", "DeepseekV3Config", **low_rank, **experts, **sizes)()


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, **TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "projection_dim": 16}
    vision = {**sizes, "image_size": 16, "patch_size": 4, "projection_dim": 16}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def pairs(seed: int) -> Inputs:
    return {"input_ids": tokens(seed), "pixel_values": noise(seed, 2, 3, 16, 16), "return_loss": torch.tensor(True)}


GEMMA = decoder("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED)
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
QWEN = decoder("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, **QWEN_EXPERTS)
GPT_OSS = decoder("GptOssForCausalLM", "GptOssConfig", **GROUPED, num_local_experts=4, num_experts_per_tok=2)

MORE = (
    Family("Qwen3-MoE", QWEN, language, generates=True, lora=("q_proj",)),
    Family("Gemma 3", GEMMA, language, generates=True, lora=("q_proj",)),
    Family("GPT-OSS", GPT_OSS, language, generates=True, lora=("q_proj",)),
    Family("DeepSeek-V3", latent_attention_experts, language, generates=True, lora=("q_b_proj",)),
    Family("CLIP", clip, pairs, lora=("q_proj",)),
)
