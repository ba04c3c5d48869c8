"""Checks of optimizer settings. Every refusal is a ``ValueError`` that names the setting."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def number(name: str, value: Any, *, least: float = 0.0, below: float | None = None) -> float:
    """``value`` as a float; a tensor must have one element.

    Raises:
        ValueError: not a number, or outside of ``[least, below)``.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if below is not None and not least <= result < below:
        raise ValueError(f"{name} must be in [{least:g}, {below:g}), got {value}")
    if not least <= result:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    return result


def two_betas(value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is two numbers in [0, 1)."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {value!r}")
    for index in range(2):
        number(f"betas[{index}]", value[index], below=1.0)


def clip_norm(value: Any) -> None:
    """Raise ``ValueError`` unless ``max_grad_norm`` is None or a positive number."""
    if value is not None and not number("max_grad_norm", value) > 0:
        raise ValueError(f"max_grad_norm must be positive or None, got {value}")


def host_flags(capturable: bool, differentiable: bool) -> None:
    """Raise ``ValueError`` for torch's flags that an update on the host cannot honour."""
    for name, value in (("capturable", capturable), ("differentiable", differentiable)):
        if value:
            raise ValueError(f"{name}=True has no meaning for an update on the host; use {name}=False")
