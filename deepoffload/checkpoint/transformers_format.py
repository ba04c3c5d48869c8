"""What transformers adds to a saved model: names and packing as on the hub, config files, which tied name is kept."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from deepoffload.errors import UnsupportedError


def is_pretrained_model(model: nn.Module) -> bool:
    """True for transformers' models; does not import transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def refuse_what_is_not_plain(model: nn.Module) -> None:
    """Quantized models and adapters have their own formats."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is quantized; save_pretrained writes plain weights only: dequantize it first"
        )
    peft = sys.modules.get("peft")
    if getattr(model, "_hf_peft_config_loaded", False) or (peft is not None and isinstance(model, peft.PeftModel)):
        raise UnsupportedError(
            f"{type(model).__name__} has adapters: they are small, save them with peft's own "
            "model.save_pretrained(...), or merge them into the weights first"
        )


def ignored_names(model: nn.Module) -> frozenset[str]:
    """Names that the model's class says are never saved."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def droppable_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Of names for one tensor, those that loading ties again; at least one name is never among them."""
    patterns = []
    for prefix, module in model.named_modules():
        tied = getattr(module, "_tied_weights_keys", None) or ()
        patterns += [f"{prefix}.{key}" if prefix else key for key in tied]
    every = sorted(names)
    matching = [name for name in every if any(re.search(pattern, name) for pattern in patterns)]
    return set(matching[: len(every) - 1])


def as_on_disk(model: nn.Module, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Names and packing of the checkpoint format, by transformers' own reverse conversion (version 5 and later)."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    if loading is None:
        return tensors
    result: Mapping[str, Tensor] = loading.revert_weight_conversion(model, dict(tensors))
    return result


def write_config_files(model: Any, directory: str) -> None:
    """``config.json``, ``generation_config.json``, and the code of custom models."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
