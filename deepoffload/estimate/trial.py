"""A model of very many experts is tried with few layers and experts first: what cannot be run on shapes is said in a
second, and not when hundreds of thousands of modules have been built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepoffload.config import Config, Precision
from deepoffload.errors import ConfigError, UsageError
from deepoffload.estimate.dry_run import NeedsValues, dry_run
from deepoffload.estimate.inputs import transformers_loss
from deepoffload.estimate.meta_model import by_transformers
from deepoffload.runtime.compute_types import compute_types

EXPERTS_MIN = 500
"""Models with fewer experts, in all layers together, are built at once."""
LAYERS, EXPERTS, TOKENS = 4, 8, 16
"""Of the trial."""


def refuse_what_needs_values(settings: Mapping[str, Any]) -> None:
    """Raises ``NeedsValues`` where a small model of the same sort needs them. Anything else that goes wrong may be so
    because it is small: the whole model tells."""
    if _most(settings, _counts_experts) * _most(settings, _counts_layers) < EXPERTS_MIN:
        return
    small = {key: _fewer(key, value) for key, value in settings.items()}
    try:
        model, _ = by_transformers(small, checkpointing=False)
    except ConfigError:
        return
    if model is None:
        return
    try:
        types = compute_types(Config(precision=Precision.BF16), [model])
        dry_run(model, transformers_loss(model, 1, TOKENS), types=types)
    except NeedsValues:
        raise
    except UsageError:
        return


def _most(settings: Mapping[str, Any], counts: Any) -> int:
    return max((value for key, value in settings.items() if counts(key, value)), default=0)


def _fewer(key: str, value: Any) -> Any:
    if _counts_layers(key, value):
        return min(value, LAYERS)
    return min(value, EXPERTS) if _counts_experts(key, value) else value


def _counts_layers(key: str, value: object) -> bool:
    return isinstance(value, int) and (key.endswith("layers") or key == "n_layer")


def _counts_experts(key: str, value: object) -> bool:
    return isinstance(value, int) and "expert" in key and key.startswith(("num_", "n_")) and "per_tok" not in key
