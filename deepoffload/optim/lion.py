"""``CPULion``: Lion on the host, for paged and ordinary CPU parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import LionHyper
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.rule import Rule

_ARRAYS = {"exp_avg": "exp_avg"}


class CPULion(HostOptimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms") with DeepSpeedCPULion's arguments.

    ``p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g``

    Args:
        model_params: parameters or parameter groups; paged and ordinary CPU parameters may be mixed.
        lr: learning rate, a number or a tensor with one element; about a tenth to a third of Adam's.
        betas: of the update and of the momentum.
        weight_decay: decoupled, as in AdamW.
        fp32_optimizer_states: False is DeepSpeed's way to say ``state_dtype="bf16"``.
        maximize: ascend instead of descend.
        state_dtype: what the momentum is stored in, ``"fp32"`` or ``"bf16"``; see :class:`CPUAdam`.
        master_weights: as for :class:`CPUAdam`.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.

    Raises:
        ValueError: a setting is out of range. UnsupportedError: no master weights for paged parameters.
    """

    rule = Rule("CPULion", cpu_adam.lion_step)

    def __init__(
        self,
        model_params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        master_weights: bool = True,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_dtype": state_dtype if fp32_optimizer_states else "bf16",
            "master_weights": master_weights,
        }
        self._check_settings(defaults)
        super().__init__(model_params, defaults, max_grad_norm)

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        checks.not_negative("lr", group["lr"])
        checks.two_betas(group["betas"])
        checks.not_negative("weight_decay", group["weight_decay"])
        checks.state_dtype(group["state_dtype"], "fp32", "bf16")

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return _ARRAYS

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> LionHyper:
        return LionHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            state_dtype=checks.STATE_DTYPES[group["state_dtype"]],
        )
