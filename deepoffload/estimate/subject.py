"""What an estimate is about: a live module, a transformers configuration, or numbers; always a module to plan on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.configuration import HIDDEN_KEYS, LAYERS_KEYS, read_settings
from deepoffload.estimate.decoder import DEFAULT_VOCABULARY, Decoder, DecoderShape, shape_of_count
from deepoffload.estimate.dry_run import LossOf
from deepoffload.estimate.inputs import (
    pictures_among_tokens,
    sounds_among_tokens,
    takes_pictures_only,
    transformers_loss,
)
from deepoffload.estimate.kernels import KnownCalls
from deepoffload.estimate.meta_model import by_transformers, run_every_layer
from deepoffload.estimate.positions import longest_sequence, stated_limits
from deepoffload.estimate.shapes import shape_in
from deepoffload.estimate.trial import refuse_what_needs_values

LENGTH = 1024
"""Tokens in a sequence where nobody says how many."""

PRESENT = frozenset(("torch", "deepoffload", "__main__"))
"""Packages that any program here has loaded, and what no other program can."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: sequences, and tokens in each."""

    size: int = 1
    length: int = LENGTH

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
    people. ``notes``: what they should know about that. ``known``: what runs of it have found out of its kernels."""

    module: nn.Module
    name: str
    source: str
    batch: Batch
    loss_of: LossOf | None
    notes: tuple[str, ...] = ()
    loss_at: Callable[[int], LossOf] | None = None
    known: KnownCalls = field(default_factory=KnownCalls, repr=False, compare=False)

    @property
    def num_parameters(self) -> int:
        return sum(param.numel() for param in self.module.parameters())

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the Python modules that the model's classes come from, without torch's and ours."""
        names = {type(module).__module__ for module in self.module.modules()}
        return tuple(sorted(name for name in names if name.partition(".")[0] not in PRESENT))


def from_module(model: nn.Module, batch: Batch | None = None, loss_of: LossOf | None = None) -> Subject:
    """A live module. Without ``loss_of`` activations are unknown, except for models of transformers.

    Raises:
        ConfigError: ``model`` is no module, or has fewer positions than ``batch`` has.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not {type(model).__name__}")
    if loss_of is None and hasattr(getattr(model, "config", None), "to_dict"):
        return _of_transformers(model, batch or Batch(), "a live module", may_shorten=batch is None)
    return Subject(model, type(model).__name__, "a live module", batch or Batch(), loss_of)


def _of_transformers(model: Any, batch: Batch, source: str, *, may_shorten: bool) -> Subject:
    name = type(model).__name__
    if takes_pictures_only(model):
        batch = replace(batch, length=1)
        notes: tuple[str, ...] = (
            f"{name} takes pictures: they are what is counted as tokens, and --batch says how many",
        )
        loss_of = transformers_loss(model, batch.size, batch.length)
        return Subject(model, name, source, batch, loss_of, notes)
    batch, notes = _within(batch, longest_sequence(model), name, may_shorten)
    notes = (*notes, *_beyond(model.config.to_dict(), batch, name))
    among = [
        what
        for what, there in (("pictures", pictures_among_tokens(model)), ("sounds", sounds_among_tokens(model)))
        if there
    ]
    if among:
        where = f"where {' and '.join(among)} are among them depends on values"
        notes = (*notes, f"{name} is run on tokens alone: {where}")
    loss_at = partial(transformers_loss, model, batch.size)
    return Subject(model, name, source, batch, loss_at(batch.length), notes, loss_at)


def _defaults(file: Path, settings: Mapping[str, Any], model: Any) -> tuple[str, ...]:
    """What transformers took for sizes that the file does not say."""
    if any(isinstance(value, dict) and "config" in key for key, value in settings.items()):
        return ()  # the sizes are those of parts
    taken = [
        f"{names[0]} = {value}"
        for names in (LAYERS_KEYS, HIDDEN_KEYS)
        if not any(name in settings for name in names)
        and isinstance(value := getattr(model.config, names[0], None), int)
    ]
    return (f"{file}: not said there, so as transformers has it: {', '.join(taken)}",) if taken else ()


def _within(batch: Batch, most: int | None, name: str, may_shorten: bool) -> tuple[Batch, tuple[str, ...]]:
    """``batch``, or a shorter one where the model has only ``most`` positions, and what to say of that."""
    if most is None or batch.length <= most:
        return batch, ()
    if not may_shorten:
        raise ConfigError(f"{name} has {most} positions, so its sequences cannot have {batch.length} tokens")
    return replace(batch, length=most), (f"{name} has {most} positions: the sequences have {most} tokens",)


def _beyond(settings: Mapping[str, Any], batch: Batch, name: str) -> tuple[str, ...]:
    """What to say of sequences that are longer than a model without a table of positions states."""
    stated = max(stated_limits(settings), default=batch.length)
    if batch.length <= stated:
        return ()
    said = f"{name} states {stated} positions, and has no table that ends there"
    return (f"{said}; it is estimated for sequences of {batch.length} tokens",)


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
    shape: DecoderShape,
    batch: Batch | None = None,
    *,
    checkpointing: bool = False,
    tiled: bool = False,
    source: str = "sizes",
) -> Subject:
    """``tiled``: the loss is computed in tiles of tokens."""
    batch = batch or Batch()
    with torch.device("meta"):
        model = Decoder(shape, checkpointing=checkpointing, tiled=tiled)
    name = f"decoder, {shape.layers} layers of {shape.hidden}"
    return Subject(model, name, source, batch, lambda call: call(torch.zeros(batch.size, batch.length).long()))


def from_config(
    path: str | os.PathLike[str],
    batch: Batch | None = None,
    *,
    checkpointing: bool = False,
    arithmetic: bool = False,
    may_shorten: bool = False,
) -> Subject:
    """The model of a transformers configuration: a ``config.json`` or the directory that holds it. Nothing is
    downloaded, and no code that comes with a model is run.

    Args:
        arithmetic: use the sizes in the file only, even where transformers is installed and knows the model.
        may_shorten: where the model has fewer positions than ``batch``, take as many tokens as it has and say so in
            ``notes``. So it is without a ``batch``.

    Raises:
        ConfigError: the file is missing, is no such configuration, or lacks a size; or the model has fewer positions.
        UsageError: the model cannot be run on shapes (said here where it would take long to build).
    """
    may_shorten = may_shorten or batch is None
    batch = batch or Batch()
    file, settings = read_settings(Path(path))
    why = ""
    if not arithmetic:
        try:
            refuse_what_needs_values(settings)
            model, why_not = by_transformers(settings, checkpointing=checkpointing)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        if model is not None:
            skipping = run_every_layer(model)
            subject = _of_transformers(model, batch, f"{file}, built by transformers", may_shorten=may_shorten)
            skipped = f"{subject.name} skips layers at random in training; it is estimated with all of them"
            said = (*_defaults(file, settings, model), *((skipped,) if skipping else ()))
            return replace(subject, notes=(*said, *subject.notes))
        why = f"{file}: {why_not}, so the sizes in it are taken for those of a decoder (--arithmetic)"
    try:
        shape, assumed = shape_in(settings, file)
    except ConfigError as error:
        raise ConfigError(f"{why}{'; ' if why else ''}{error}") from None
    batch, notes = _within(batch, shape.positions or None, "the model", may_shorten)
    notes = notes if shape.positions else _beyond(settings, batch, "the model")
    subject = from_shape(shape, batch, checkpointing=checkpointing, source=f"{file}, by the sizes in it")
    guesses = f"{file}: not said there, so assumed: {'; '.join(assumed)}"
    return replace(subject, notes=(*filter(None, (why,)), *((guesses,) if assumed else ()), *notes))
