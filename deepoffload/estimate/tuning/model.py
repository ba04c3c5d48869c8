"""The model whose settings are chosen, in every form: on shapes for the cost model, with random weights for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.estimate.configuration import read_settings
from deepoffload.estimate.decoder import Decoder, DecoderShape
from deepoffload.estimate.dry_run import LossOf
from deepoffload.estimate.inputs import transformers_loss
from deepoffload.estimate.meta_model import by_transformers
from deepoffload.estimate.subject import Batch, Subject, from_config, from_module, from_shape
from deepoffload.estimate.tuning.own_model import OwnModel
from deepoffload.tiling.tile_loss import tile_loss


@dataclass(frozen=True)
class ModelForm:
    """How a model is made again: by transformers from the configuration at ``path``, as a decoder of ``shape``, or by
    ``function`` of the program. ``length``: tokens in a sequence."""

    length: int
    path: str = ""
    shape: DecoderShape | None = None
    function: str = ""

    @classmethod
    def of(cls, subject: Subject, path: str | None) -> ModelForm:
        """That of a subject, which was read from ``path`` or made of sizes."""
        length, module = subject.batch.length, subject.module
        if isinstance(module, Decoder):
            return cls(length, shape=module.shape)
        if path is None:
            raise ConfigError("a model that is tuned comes from a configuration or from sizes")
        return cls(length, str(Path(path).absolute()))

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> ModelForm:
        """The opposite of :meth:`as_json`."""
        shape = said.get("shape")
        shape = None if shape is None else DecoderShape(**shape)
        return cls(said["length"], said["path"], shape, said["function"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def subject(self, micro_batch: int, *, checkpointing: bool, tiled: bool) -> Subject:
        """It on shapes.

        Raises:
            ConfigError, UnsupportedError: it cannot be run so.
        """
        batch = Batch(micro_batch, self.length)
        if self.shape is not None:
            return from_shape(self.shape, batch, checkpointing=checkpointing, tiled=tiled)
        if self.function:
            own = OwnModel.named(self.function)
            with torch.device("meta"):
                model, loss_of = own.make(micro_batch, self.length, checkpointing=checkpointing, tiled=tiled)
            return from_module(model, batch, loss_of)
        subject = from_config(self.path, batch, checkpointing=checkpointing)
        if tiled:
            tile_loss(subject.module)
        return subject

    def build(self, micro_batch: int, *, checkpointing: bool, tiled: bool) -> tuple[nn.Module, LossOf, int]:
        """It with random weights, what gives its loss of a micro-batch, and how many different tokens there are (0: the
        loss draws them itself).

        Raises:
            ConfigError, UnsupportedError: it cannot be built so.
        """
        if self.shape is not None:
            size = (micro_batch, self.length)
            model = Decoder(self.shape, checkpointing=checkpointing, tiled=tiled)
            return model, lambda call: call(torch.zeros(size, dtype=torch.int64)), self.shape.vocabulary
        if self.function:
            own = OwnModel.named(self.function)
            return *own.make(micro_batch, self.length, checkpointing=checkpointing, tiled=tiled), 0
        file, settings = read_settings(Path(self.path))
        built, why_not = by_transformers(settings, checkpointing=checkpointing, device="cpu")
        if built is None:
            raise UnsupportedError(f"{file}: {why_not}")
        if tiled:
            tile_loss(built)
        vocabulary = int(getattr(built.config.get_text_config(), "vocab_size", None) or 2)
        return built, transformers_loss(built, micro_batch, self.length), vocabulary


def possible(form: ModelForm) -> tuple[tuple[bool, ...], tuple[bool, ...], tuple[str, ...]]:
    """The values that checkpointing and the tiled loss can have for a model, and notes on what it cannot do."""
    notes = []
    values: dict[str, tuple[bool, ...]] = {"checkpointing": (False, True), "tiled": (False, True)}
    for name in values:
        said = {"checkpointing": False, "tiled": False, name: True}
        try:
            form.subject(1, **said)
        except (ConfigError, UnsupportedError) as error:
            values[name] = (False,)
            notes.append(f"not looked at: {error}")
    return values["checkpointing"], values["tiled"], tuple(notes)
