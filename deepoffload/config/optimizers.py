"""The optimizers that a configuration can name, and the parameters of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KnownOptimizer:
    """``defaults``: parameters that are always passed on. ``others``: those that are when they are said."""

    defaults: Mapping[str, object] = field(hash=False)
    others: tuple[str, ...] = ()


_ADAM = KnownOptimizer(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "adamw_mode": True,
    },
    ("amsgrad", "maximize", "fp32_optimizer_states", "state_dtype"),
)
OPTIMIZERS: Mapping[str, KnownOptimizer] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": KnownOptimizer(
        {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, ("maximize", "fp32_optimizer_states", "state_dtype")
    ),
    "adagrad": KnownOptimizer(
        {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}, ("lr_decay", "initial_accumulator_value", "maximize")
    ),
    "sgd": KnownOptimizer({"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}, ("dampening", "nesterov", "maximize")),
}
