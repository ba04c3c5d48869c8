"""Settings of parameter groups as torch's optimizers and DeepSpeed name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepoffload.checkpoint.convert.training_run import ADAM
from deepoffload.errors import UnsupportedError

_HOW_TO_RUN: Mapping[str, Any] = {"foreach": None, "differentiable": False, "fused": None}
_TORCH_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    ADAM: {
        "amsgrad": False,
        "maximize": False,
        "capturable": False,
        "decoupled_weight_decay": True,
        **_HOW_TO_RUN,
    },
    "adagrad": {"maximize": False, **_HOW_TO_RUN},
    "sgd": {"nesterov": False, "dampening": 0, "maximize": False, **_HOW_TO_RUN},
}
_OWN = frozenset({"adamw_mode", "bias_correction", "state_dtype", "master_weights"})
_DEEPSPEED = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad"})


def for_torch(kind: str | None, settings: Mapping[str, Any], *, keep_own: bool = False) -> dict[str, Any]:
    """The settings that torch's optimizer of a kind has in its groups.

    Args:
        keep_own: also those that only our optimizers have.

    Raises:
        UnsupportedError: torch has no such optimizer, or it cannot do what a setting says.
    """
    if kind is None or kind not in _TORCH_DEFAULTS:
        raise UnsupportedError(f"torch has no optimizer that continues from the state of {kind!r}")
    if not settings.get("bias_correction", True) and not keep_own:
        raise UnsupportedError("bias_correction=False: torch's Adam always corrects the bias, so it cannot continue")
    made = {**_TORCH_DEFAULTS[kind], **settings}
    if "adamw_mode" in settings:
        made["decoupled_weight_decay"] = settings["adamw_mode"]
    return made if keep_own else {key: value for key, value in made.items() if key not in _OWN}


def for_deepspeed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that DeepSpeed's Adam and torch's have in common."""
    return {key: value for key, value in settings.items() if key in _DEEPSPEED}
