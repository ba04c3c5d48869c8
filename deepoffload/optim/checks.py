"""Checks of optimizer settings. Every refusal is a ``ValueError`` that names the setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.native.cpu_adam import StateDType


def number(name: str, value: Any) -> float:
    """``value`` as a float; a tensor must have one element.

    Raises:
        ValueError: not a number, or NaN.
    """
    if isinstance(value, str):
        raise ValueError(f"{name} must be a number, got the text {value!r}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(result):
        raise ValueError(f"{name} must be a number, got {value}")
    return result


def finite(hyper: Any) -> None:
    """Raise ``ValueError`` when a setting of one update (a named tuple) is infinite or NaN: no weight survives it."""
    for name, value in hyper._asdict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def not_negative(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is a number of at least 0."""
    if number(name, value) < 0.0:
        raise ValueError(f"{name} must not be negative, got {value}")


def two_betas(value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is two numbers in [0, 1)."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if not is_pair or not all(0.0 <= number("betas", beta) < 1.0 for beta in value):
        raise ValueError(f"betas must be two numbers in [0, 1), got {value!r}")


def clip_norm(value: Any) -> None:
    """Raise ``ValueError`` unless ``max_grad_norm`` is None or a positive number."""
    if value is not None and number("max_grad_norm", value) <= 0:
        raise ValueError(f"max_grad_norm must be positive or None, got {value}")


STATE_DTYPES = {"fp32": StateDType.FP32, "bf16": StateDType.BF16, "8bit": StateDType.EIGHT_BIT}


def state_dtype(value: Any, *known: str) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the names in ``known``."""
    if value not in known:
        raise ValueError(f"state_dtype must be {' or '.join(map(repr, known))}, got {value!r}")


def host_flags(capturable: bool, differentiable: bool) -> None:
    """Raise ``ValueError`` for torch's flags that an update on the host cannot honour."""
    for name, value in (("capturable", capturable), ("differentiable", differentiable)):
        if value:
            raise ValueError(f"{name}=True has no meaning for an update on the host; use {name}=False")


def each_once(params: Sequence[Tensor]) -> None:
    """Raise UsageError for a parameter that a group has twice: torch would step it twice."""
    if len({id(param) for param in params}) < len(params):
        raise UsageError(
            "a parameter is in its group twice, which torch only warns about, and steps it twice then; give each "
            "parameter once, as model.parameters() does"
        )
