"""A model's configuration file: read, and refused by name where it says what no model has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepoffload.errors import ConfigError

LAYERS_MAX = 10_000
"""A configuration with more is a mistake: each layer is built once, on the meta device."""

LAYERS_KEYS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_blocks", "depths",
)  # fmt: skip
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "hidden_sizes", "embed_dim")
"""How configurations call the number of layers and the hidden size; lists are of a number for each stage."""
_MOST = {
    LAYERS_MAX: LAYERS_KEYS,
    1_000_000: (*HIDDEN_KEYS, "head_dim", "d_kv"),
    100_000: (
        "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_key_value_heads", "num_kv_heads",
    ),
    100_000_000: ("vocab_size", "vocabulary_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}  # fmt: skip
MOST = {key: most for most, keys in _MOST.items() for key in keys}
"""The sizes that every model with such a key has at least one of, and more than any model has of them."""


def read_settings(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file (``path`` itself, or ``config.json`` in it) and what it says.

    Raises:
        ConfigError: it is missing, is no JSON object, or has a size that no model has.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a config.json or the directory that holds one") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error})") from error
    except RecursionError:
        raise ConfigError(f"{file}: is nested more deeply than any configuration") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: holds a {type(settings).__name__} where a model's configuration was expected")
    if not isinstance(settings.get("model_type", ""), (str, type(None))):
        raise ConfigError(f'{file}: model_type = {settings["model_type"]!r}: expected a text such as "llama"')
    _names(settings, file)
    _check_sizes(settings, str(file))
    return file, settings


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _names(settings: dict[str, Any], file: Path) -> None:
    """``architectures`` as a list of names, however it was written."""
    said = settings.get("architectures")
    names = [said] if isinstance(said, str) else said or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'{file}: architectures = {said!r}: expected names such as ["LlamaForCausalLM"]')
    settings["architectures"] = names


def _check_sizes(settings: Mapping[str, Any], where: str) -> None:
    """Only numbers: what else a size may be (null, a list of one for each layer) the model's own code knows."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_sizes(value, f"{where}: {key}")
        most = MOST.get(key, LAYERS_MAX if key.endswith("layers") else None)
        if most is None or not isinstance(value, (int, float)):
            continue
        if key in MOST and (isinstance(value, bool) or value != value // 1 or value < 1):
            raise ConfigError(f"{where}: {key} = {value!r}: expected a whole number of at least 1")
        if value > most:
            raise ConfigError(f"{where}: {key} = {value:,}: more than any model has (at most {most:,})")
