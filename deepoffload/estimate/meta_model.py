"""A transformers configuration's model: on the meta device, or with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.errors import ConfigError

_NOT_OF_THE_MODEL = ("model_type", "transformers_version", "attn_implementation", "_attn_implementation")
"""What a configuration says of the program that wrote it, and kernels that this machine perhaps does not have."""


def by_transformers(settings: Mapping[str, Any], *, checkpointing: bool, device: str = "meta") -> tuple[Any, str]:
    """The model in training; or None, and why there is none. On another ``device`` it has random weights.

    Raises:
        ConfigError: transformers knows such models and refuses this configuration.
    """
    kind = settings.get("model_type")
    if not kind:
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
    model = _built(transformers, settings, checkpointing, device)
    return model, "" if model is not None else f"transformers has no model to train for {kind!r}"


def run_every_layer(model: nn.Module) -> bool:
    """Have a model run the layers that it skips at random (LayerDrop, arXiv 1909.11556): which ones depends on values.
    Whether it has such."""
    skipping: list[Any] = [module for module in model.modules() if getattr(module, "layerdrop", 0)]
    for module in skipping:
        module.layerdrop = 0.0
    return bool(skipping)


def _built(transformers: Any, settings: Mapping[str, Any], checkpointing: bool, device: str) -> Any:
    fields = {key: value for key, value in settings.items() if key not in _NOT_OF_THE_MODEL}
    try:
        config = transformers.AutoConfig.for_model(settings["model_type"], **fields)
        kind = _class_of(transformers, settings, config)
        if kind is None:
            return None
        with torch.device(device):
            model = kind(config) if hasattr(kind, "forward") else kind.from_config(config)
        if checkpointing:
            # the old name goes away in transformers 6
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model.train()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot build a {settings['model_type']} of this configuration: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _class_of(transformers: Any, settings: Mapping[str, Any], config: Any) -> Any:
    """The class that the file names first, where transformers has it, or the usual one for such a configuration."""
    name = next(iter(settings.get("architectures") or ()), None)
    named = getattr(transformers, name, None) if name else None
    if isinstance(named, type) and issubclass(named, nn.Module):
        made_for = getattr(named, "config_class", None)
        if made_for is not None and not isinstance(config, made_for):
            raise ConfigError(
                f"architectures names {name}, which is made of a {made_for.__name__}, but model_type = "
                f"{settings['model_type']!r} says {type(config).__name__}"
            )
        return named
    kinds = [getattr(transformers, kind) for kind in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")]
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)
