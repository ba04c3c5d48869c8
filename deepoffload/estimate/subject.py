"""What an estimate is about: a live module, a transformers configuration, or numbers; always a module to plan on."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.decoder import DEFAULT_VOCABULARY, Decoder, DecoderShape, shape_of_count
from deepoffload.estimate.dry_run import LossOf
from deepoffload.estimate.inputs import transformers_loss
from deepoffload.estimate.shapes import shape_in

LAYERS_MAX = 10_000
"""A configuration with more is a mistake: each layer is built once, on the meta device."""


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
    estimated); ``loss_at``: how to run it on sequences of another length. ``source``: how its sizes became known, for
    people. ``notes``: what they should know about that."""

    module: nn.Module
    name: str
    source: str
    batch: Batch
    loss_of: LossOf | None
    notes: tuple[str, ...] = ()
    loss_at: Callable[[int], LossOf] | None = None

    @property
    def num_parameters(self) -> int:
        return sum(param.numel() for param in self.module.parameters())


def from_module(model: nn.Module, batch: Batch | None = None, loss_of: LossOf | None = None) -> Subject:
    """A live module. Without ``loss_of`` activations are unknown, except for models of transformers."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not {type(model).__name__}")
    batch = batch or Batch()
    loss_at = None
    if loss_of is None and hasattr(getattr(model, "config", None), "to_dict"):
        loss_at = partial(transformers_loss, model, batch.size)
        loss_of = loss_at(batch.length)
    return Subject(model, type(model).__name__, "a live module", batch, loss_of, loss_at=loss_at)


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
    notes: tuple[str, ...] = ()
    if not arithmetic:
        model, why_not = _by_transformers(settings)
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
                loss_at=partial(transformers_loss, model, batch.size),
            )
        notes = (f"{file}: {why_not}, so the sizes in it are taken for those of a decoder (--arithmetic)",)
    try:
        shape = shape_in(settings, file)
    except ConfigError as error:
        raise ConfigError(f"{'; '.join((*notes, str(error)))}") from None
    subject = from_shape(shape, batch, checkpointing=checkpointing, source=f"{file}, by the sizes in it")
    return replace(subject, notes=notes)


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a config.json or the directory that holds one") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: holds a {type(settings).__name__} where a model's configuration was expected")
    if not isinstance(settings.get("model_type", ""), (str, type(None))):
        raise ConfigError(f'{file}: model_type = {settings["model_type"]!r}: expected a text such as "llama"')
    for key, value in settings.items():
        if key.endswith("layers") and isinstance(value, int) and value > LAYERS_MAX:
            raise ConfigError(f"{file}: {key} = {value:,}: more layers than any model has (at most {LAYERS_MAX:,})")
    return file, settings


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _by_transformers(settings: Mapping[str, Any]) -> tuple[Any, str]:
    """The model on the meta device; or None, and why there is none."""
    kind = settings.get("model_type")
    if kind is None:
        return None, "it has no model_type"
    if importlib.util.find_spec("transformers") is None:
        return None, "transformers is not installed"
    try:
        import transformers

        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    except Exception as error:  # another package's import can fail in any way: versions that do not fit together
        return None, f"transformers is installed and cannot be imported ({type(error).__name__}: {error})"
    if kind not in known:
        return None, f"transformers {transformers.__version__} does not know the model type {kind!r}"
    model = _built(transformers, settings)
    return model, "" if model is not None else f"transformers has no model to train for {kind!r}"


def _built(transformers: Any, settings: Mapping[str, Any]) -> Any:
    fields = {key: value for key, value in settings.items() if key not in ("model_type", "transformers_version")}
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
