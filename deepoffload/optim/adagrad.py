"""``CPUAdagrad``: Adagrad on the host, for paged and ordinary CPU parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdagradHyper
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.rule import Rule

_ARRAYS = {"sum": "exp_avg_sq"}


class CPUAdagrad(HostOptimizer):
    """Adagrad on the host with ``torch.optim.Adagrad``'s arguments and defaults.

    Args:
        params: parameters or parameter groups; paged and ordinary CPU parameters may be mixed. Gradients are dense.
        lr: learning rate, a number or a tensor with one element.
        lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        foreach, fused: accepted for compatibility; the update always is one fused pass.
        differentiable: must be False.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.

    Raises:
        ValueError: a setting is out of range.
    """

    rule = Rule("CPUAdagrad", cpu_adam.adagrad_step)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        checks.host_flags(False, differentiable)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        self._check_settings(defaults)
        super().__init__(params, defaults, max_grad_norm)

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            checks.not_negative(name, group[name])

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return _ARRAYS

    def _initial(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> AdagradHyper:
        return AdagradHyper(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            maximize=bool(group["maximize"]),
        )
