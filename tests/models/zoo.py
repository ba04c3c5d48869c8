"""The models of the matrix: ten families of transformers with small random configurations, and torch's own layers that
handle their weights in their own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from tests.support.models import CONTEXT, VOCABULARY, gpt2, llama, mixtral

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """One row of the matrix.

    Attributes:
        build: makes the model, with values from torch's random generator.
        inputs: keyword arguments of a call that gives a loss, the same for the same seed.
        generates: its ``generate`` makes tokens.
        lora: names of the modules that LoRA adapts; none for torch's own layers.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], Inputs]
    generates: bool = False
    lora: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def is_transformer(self) -> bool:
        return bool(self.lora)

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        """Loss of one batch: transformers' own, or the mean square of what a layer puts out."""
        dtype = next(model.parameters()).dtype
        given = {
            key: value.to(dtype) if value.is_floating_point() else value for key, value in self.inputs(seed).items()
        }
        output = model(**given)
        return output.square().mean() if isinstance(output, Tensor) else output.loss

    def prompt(self, seed: int) -> Inputs:
        """The inputs of ``generate``."""
        given = {key: value for key, value in self.inputs(seed).items() if key != "labels"}
        if "input_ids" in given:
            given["input_ids"] = given["input_ids"][:, :6]
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        return given


# -- transformers ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens(seed: int, count: int = CONTEXT) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, count), generator=torch.Generator().manual_seed(seed))


def language(seed: int) -> Inputs:
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def translation(seed: int) -> Inputs:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 500, 8)}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pictures(seed: int) -> Inputs:
    return {"pixel_values": noise(seed, 2, 3, 16, 16), "labels": torch.tensor([seed % 4, 3])}


def speech(seed: int) -> Inputs:
    return {"input_features": noise(seed, 2, 8, 32), "labels": tokens(seed, 8)}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokens_of_t5 = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**settings, **tokens_of_t5))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **HEADS, pad_token_id=0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    picture = {"image_size": 16, "patch_size": 4, "num_labels": 4}
    return ViTForImageClassification(ViTConfig(**sizes, **picture, hidden_dropout_prob=0.1))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SIZES, **TOKENS, state_size=4, time_step_rank=4))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.1}
    lengths = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    asked = {"vocab_size": VOCABULARY, "decoder_start_token_id": 1, "begin_suppress_tokens": None}
    config = WhisperConfig(**layers, **sizes, **lengths, **(TOKENS | asked))
    return WhisperForConditionalGeneration(config)


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **HEADS, **TOKENS, **dropout))


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    heads = {"num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
    return OPTForCausalLM(OPTConfig(**SIZES, **TOKENS, **heads))


def small_llama() -> nn.Module:
    return llama(hidden_size=32, intermediate_size=48, num_hidden_layers=2)


def small_gpt2() -> nn.Module:
    return gpt2(n_embd=32, n_layer=2, pad_token_id=0)


# -- torch's own -------------------------------------------------------------------------------------------------------

WIDTH = 32


def sequence(seed: int) -> Inputs:
    return {"x": noise(seed, 2, 6, WIDTH)}


class Stack(nn.Module):
    """Layers of one kind, each behind an activation checkpoint if ``use_reentrant`` says which."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(depth)])
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:
            x = x.requires_grad_()  # torch asks for it: weights alone get no gradient from a reentrant checkpoint
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Recurrent(nn.Module):
    """A recurrent layer whose weights torch keeps in a flat list next to the parameters."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True, dropout=0.1, num_layers=2, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return x + y[..., :WIDTH]


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention``, which takes its output projection's weight without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return x + y


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.PReLU(), nn.Dropout(0.1))


def convolutions() -> nn.Module:
    return Stack(convolution, depth=6)


def feature_maps(seed: int) -> Inputs:
    return {"x": noise(seed, 2, 8, 6, 6)}


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized(*, spectral: bool = True) -> nn.Module:
    """One layer for each of torch's ways to compute a weight from parameters, and one of our own. ``spectral``: also
    the one that counts its forwards."""
    symmetric = nn.Linear(WIDTH, WIDTH)
    register_parametrization(symmetric, "weight", Symmetric())
    layers = [
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        *([parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))] if spectral else []),
        parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
        symmetric,
    ]
    return nn.Sequential(*layers, nn.Tanh())


class Scale(torch.autograd.Function):
    """A custom function that saves its weight and a view of it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight, weight.t())
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, transposed = context.saved_tensors
        return grad @ transposed.t(), grad.flatten(0, -2).t() @ x.flatten(0, -2) + 0.0 * weight


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Scale.apply(x, self.weight))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True)


TRANSFORMERS = (
    Family("Llama", small_llama, language, generates=True, lora=("q_proj", "down_proj")),
    Family("GPT-2", small_gpt2, language, generates=True, lora=("c_attn",)),
    Family("Mixtral", mixtral, language, generates=True, lora=("q_proj", "v_proj")),
    Family("T5", t5, translation, generates=True, lora=("q", "wo")),
    Family("BERT", bert, language, lora=("query", "value")),
    Family("ViT", vit, pictures, lora=("q_proj", "v_proj")),
    Family("Mamba", mamba, language, generates=True, lora=("in_proj",)),
    Family("Whisper", whisper, speech, generates=True, lora=("q_proj", "fc1")),
    Family("GPT-NeoX", gpt_neox, language, generates=True, lora=("query_key_value",)),
    Family("OPT", opt, language, generates=True, lora=("q_proj", "fc1")),
)

LAYERS = (
    Family("nn.LSTM", lambda: Stack(lambda: Recurrent(nn.LSTM, proj_size=16, bidirectional=True), 2), sequence),
    Family("nn.GRU", lambda: Stack(lambda: Recurrent(nn.GRU), 2), sequence),
    Family("nn.MultiheadAttention", lambda: Stack(SelfAttention), sequence),
    Family("nn.TransformerEncoderLayer", lambda: Stack(encoder_layer, 3), sequence),
    Family("convolution and batch norm", convolutions, feature_maps),
    Family("parametrizations", lambda: Stack(parametrized, 2), sequence),
    Family("custom autograd functions", lambda: Stack(Custom, 6), sequence),
)

FAMILIES = {family.name: family for family in (*TRANSFORMERS, *LAYERS)}
