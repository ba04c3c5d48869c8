"""The optimizers that a configuration can name, and the parameters of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepoffload.config.keys import ValueKind, boolean, choice_of, list_of, number


@dataclass(frozen=True)
class KnownOptimizer:
    """``defaults``: parameters that are always passed on. ``others``: those that are when they are said."""

    defaults: Mapping[str, object] = field(hash=False)
    others: tuple[str, ...] = ()


TORCHS_WEIGHT_DECAY = 0.01
"""Of torch's AdamW. DeepSpeed's key ``torch_adam`` makes one of these, and DeepSpeed's own classes decay by 0."""

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
    # DeepSpeed's defaults, which are the class's but for ns_method.
    "muon": KnownOptimizer(
        {}, ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method", "momentum_dtype")
    ),
    # torch's own, with torch's defaults.
    "adadelta": KnownOptimizer({}, ("lr", "rho", "eps", "weight_decay", "maximize")),
    "adafactor": KnownOptimizer({}, ("lr", "beta2_decay", "d", "weight_decay", "maximize")),
    "adamax": KnownOptimizer({}, ("lr", "betas", "eps", "weight_decay", "maximize")),
    "asgd": KnownOptimizer({}, ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize")),
    "nadam": KnownOptimizer(
        {}, ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")
    ),
    "radam": KnownOptimizer({}, ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")),
    "rmsprop": KnownOptimizer({}, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")),
    "rprop": KnownOptimizer({}, ("lr", "etas", "step_sizes", "maximize")),
}

_PAIR = list_of(number(0), 2)
TORCH_PARAMETERS: tuple[tuple[str, ValueKind, str], ...] = (
    ("rho", number(0, 1), "Adadelta"),
    ("beta2_decay", number(high=0), "Adafactor"),
    ("d", number(0), "Adafactor"),
    ("lambd", number(0), "ASGD"),
    ("alpha", number(0), "ASGD and RMSprop"),
    ("t0", number(0), "ASGD"),
    ("momentum_decay", number(0), "NAdam"),
    ("decoupled_weight_decay", boolean(), "NAdam and RAdam"),
    ("centered", boolean(), "RMSprop"),
    ("etas", _PAIR, "Rprop"),
    ("step_sizes", _PAIR, "Rprop"),
    ("muon_lr", number(0), "Muon, for its matrices"),
    ("adam_lr", number(0), "Muon, for what AdamW updates"),
    ("ns_method", choice_of("gram", "standard"), "Muon; `gram` where it is not said"),
    ("momentum_dtype", choice_of("fp32", "bf16"), "Muon"),
)
"""Parameters that only torch's optimizers and Muon have: name, value, and whose they are."""
