"""What an estimate is about: a live module, a transformers configuration, or numbers; always a module to plan on."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.decoder import DEFAULT_VOCABULARY, Decoder, DecoderShape, shape_of_count
from deepoffload.estimate.dry_run import LossOf
from deepoffload.estimate.inputs import transformers_loss

_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size", "vocabulary_size"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
}
"""Our names of a decoder's sizes, and what configuration files call them."""

_LEARNED_POSITIONS = ("n_positions",)
_GATED = ("silu", "swish", "swiglu", "geglu", "reglu")


@dataclass(frozen=True)
class Batch:
    """One micro-batch: sequences, and tokens in each."""

    size: int = 1
    length: int = 1024

    def __post_init__(self) -> None:
        positive_integer("batch size", self.size)
        positive_integer("sequence length", self.length)

    @property
    def tokens(self) -> int:
        return self.size * self.length


@dataclass(frozen=True)
class Subject:
    """A model to plan for. ``module`` may be on the meta device. ``loss_of``: how to run it (None: only its states are
    estimated). ``source``: how its sizes became known, for people."""

    module: nn.Module
    name: str
    source: str
    batch: Batch
    loss_of: LossOf | None

    @property
    def num_parameters(self) -> int:
        return sum(param.numel() for param in self.module.parameters())


def from_module(model: nn.Module, batch: Batch | None = None, loss_of: LossOf | None = None) -> Subject:
    """A live module. Without ``loss_of`` activations are unknown, except for models of transformers."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not {type(model).__name__}")
    batch = batch or Batch()
    if loss_of is None and hasattr(getattr(model, "config", None), "to_dict"):
        loss_of = transformers_loss(model, batch.size, batch.length)
    return Subject(model, type(model).__name__, "a live module", batch, loss_of)


def from_counts(
    parameters: int,
    layers: int,
    hidden: int,
    batch: Batch | None = None,
    *,
    vocabulary: int = DEFAULT_VOCABULARY,
    heads: int | None = None,
    checkpointing: bool = False,
) -> Subject:
    """A decoder of these sizes.

    Raises:
        ConfigError: a number makes no sense.
    """
    shape = shape_of_count(parameters, layers, hidden, vocabulary=vocabulary, heads=heads)
    return from_shape(shape, batch, checkpointing=checkpointing, source="sizes")


def from_shape(
    shape: DecoderShape, batch: Batch | None = None, *, checkpointing: bool = False, source: str = "sizes"
) -> Subject:
    batch = batch or Batch()
    with torch.device("meta"):
        model = Decoder(shape, checkpointing=checkpointing)
    name = f"decoder, {shape.layers} layers of {shape.hidden}"
    return Subject(model, name, source, batch, lambda call: call(torch.zeros(batch.size, batch.length).long()))


def from_config(
    path: str | os.PathLike[str], batch: Batch | None = None, *, checkpointing: bool = False, arithmetic: bool = False
) -> Subject:
    """The model of a transformers configuration: a ``config.json`` or the directory that holds it. Nothing is
    downloaded, and no code that comes with a model is run.

    Args:
        arithmetic: use the sizes in the file only, even where transformers is installed and knows the model.

    Raises:
        ConfigError: the file is missing, is no such configuration, or lacks a size.
    """
    batch = batch or Batch()
    file, settings = _read(Path(path))
    if not arithmetic and "model_type" in settings and importlib.util.find_spec("transformers") is not None:
        model = _with_transformers(settings)
        if model is not None:
            if checkpointing:
                # the old name goes away in transformers 6
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            model.train()
            return Subject(
                model,
                type(model).__name__,
                f"{file}, built by transformers",
                batch,
                transformers_loss(model, batch.size, batch.length),
            )
    shape = _shape_in(settings, file)
    return from_shape(shape, batch, checkpointing=checkpointing, source=f"{file}, by the sizes in it")


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a config.json or the directory that holds one") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: holds a {type(settings).__name__} where a model's configuration was expected")
    return file, settings


def _with_transformers(settings: Mapping[str, Any]) -> Any:
    """The model on the meta device, or None when this transformers does not know it."""
    import transformers

    fields = {key: value for key, value in settings.items() if key not in ("model_type", "transformers_version")}
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if settings["model_type"] not in known:
        return None
    try:
        config = transformers.AutoConfig.for_model(settings["model_type"], **fields)
        named = [getattr(transformers, name, None) for name in settings.get("architectures") or ()]
        with torch.device("meta"):
            if named and named[0] is not None:
                return named[0](config)
            kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
            for kind in [getattr(transformers, name) for name in kinds]:
                if type(config) in kind._model_mapping:
                    return kind.from_config(config)
            return None
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot build a {settings['model_type']} of this configuration: "
            f"{type(error).__name__}: {error}"
        ) from error


def _shape_in(settings: Mapping[str, Any], file: Path) -> DecoderShape:
    sizes: dict[str, int] = {}
    for ours, theirs in _FIELDS.items():
        found = next((key for key in theirs if settings.get(key) is not None), None)
        if found is not None:
            sizes[ours] = positive_integer(f"{file}: {found}", settings[found])
        elif ours in ("layers", "hidden", "vocabulary"):
            raise ConfigError(
                f"{file}: has no {theirs[0]} (nor {', '.join(theirs[1:])}); give parameters, layers and hidden size"
            )
    sizes.setdefault("heads", max(1, sizes["hidden"] // 64))
    positions = next((settings[key] for key in _LEARNED_POSITIONS if settings.get(key)), 0)
    activation = str(settings.get("hidden_act") or settings.get("activation_function") or "")
    tied = bool(settings.get("tie_word_embeddings", True))
    gated = activation in _GATED
    return DecoderShape(**sizes, gated=gated, tied=tied, positions=int(positions), biased=not gated)
