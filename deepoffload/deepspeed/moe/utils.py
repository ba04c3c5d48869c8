"""``deepspeed.moe.utils``: questions about DeepSpeed's experts, of which there are none."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepoffload.deepspeed.names import submodules
from deepoffload.errors import UsageError


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert of DeepSpeed's ``MoE``, which is not here."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is a layer of DeepSpeed's ``MoE``, and how many experts it has."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as a list: no parameter belongs to DeepSpeed's experts, so none is cut out of its group.

    Raises:
        UsageError: something else than a group or a sequence of groups.
    """
    if isinstance(param_groups, dict):
        return [param_groups]
    if not isinstance(param_groups, (tuple, list)):
        raise UsageError(f"param_groups: expected a group or a list of groups, not {type(param_groups).__name__}")
    return list(param_groups)


__getattr__ = submodules(__name__, (), "moe.utils")
