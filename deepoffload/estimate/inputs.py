"""What a model of transformers is run on: tokens, pictures or sound of the shapes that its configuration says."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.estimate.dry_run import LossOf

_SOUND_STRIDE = 320
"""Samples of a frame where a configuration does not say (wav2vec 2.0, arXiv 2006.11477)."""


def transformers_loss(model: Any, size: int, length: int) -> LossOf:
    """Calls a model with ``size`` sequences of ``length`` tokens (or frames, or as many pictures) and gives its loss,
    or the sum of its first output where it has none."""
    names = set(inspect.signature(model.forward).parameters)

    def loss_of(call: Any) -> Tensor:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        inputs = _inputs(model, names, size, length, dtype)
        out = call(**inputs)
        loss = out.get("loss") if hasattr(out, "get") else None
        return loss if loss is not None else _first_float(model, out)

    return loss_of


def _inputs(model: Any, names: set[str], size: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    config = model.config
    kind = type(model).__name__
    inputs: dict[str, Any] = {}
    if "pixel_values" in names and not pictures_among_tokens(model):
        inputs["pixel_values"] = torch.zeros(size, *_picture(config), dtype=dtype)
    if "input_features" in names and not sounds_among_tokens(model):
        frames = 2 * int(getattr(config, "max_source_positions", length))
        inputs["input_features"] = torch.zeros(size, int(getattr(config, "num_mel_bins", 80)), frames, dtype=dtype)
    if "input_values" in names:
        stride = math.prod(getattr(config, "conv_stride", ()) or (_SOUND_STRIDE,))
        inputs["input_values"] = torch.zeros(size, stride * (length + 1), dtype=dtype)
    tokens = torch.zeros(size, length, dtype=torch.int64)
    if "input_ids" in names:
        inputs["input_ids"] = tokens
    told = "ForCausalLM" in kind or kind.endswith(("LMHeadModel", "ForMaskedLM"))
    if "labels" in names and (told or getattr(config, "is_encoder_decoder", False)):
        inputs["labels"] = tokens
    elif "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens
    return inputs


def takes_pictures_only(model: Any) -> bool:
    """Whether a model takes pictures, and no tokens."""
    names = set(inspect.signature(model.forward).parameters)
    return "pixel_values" in names and not names & {"input_ids", "decoder_input_ids"}


def pictures_among_tokens(model: Any) -> bool:
    """Whether a model of language has places for pictures among its tokens. It counts them by the tokens' values, so on
    shapes it is run without any."""
    return any(getattr(model.config, name, None) is not None for name in ("image_token_id", "image_token_index"))


def sounds_among_tokens(model: Any) -> bool:
    """The same of sounds."""
    return any(getattr(model.config, name, None) is not None for name in ("audio_token_id", "audio_token_index"))


def _picture(config: Any) -> tuple[int, ...]:
    """Channels, height and width; of a film the frames before them."""
    seen = getattr(config, "vision_config", None) or config
    side = getattr(seen, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    frames = getattr(seen, "num_frames", None)
    return *((int(frames),) if frames else ()), int(getattr(seen, "num_channels", 3)), int(height), int(width)


def _first_float(model: Any, out: Any) -> Tensor:
    for value in out.values() if hasattr(out, "values") else out:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float().sum()
    raise UsageError(f"{type(model).__name__} gave nothing that a loss could be made of")
