"""``deepspeed.moe.utils``: questions about DeepSpeed's experts, of which there are none."""

from __future__ import annotations

from torch import Tensor, nn

from deepoffload.deepspeed.names import submodules


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert of DeepSpeed's ``MoE``, which is not here."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is a layer of DeepSpeed's ``MoE``, and how many experts it has."""
    return False, 0


__getattr__ = submodules(__name__, (), "moe.utils")
