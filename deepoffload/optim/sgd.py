"""``CPUSGD``: SGD on the host, for paged and ordinary CPU parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SgdHyper
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.rule import Rule

_ARRAYS = {"momentum_buffer": "exp_avg"}
_NOTHING: Mapping[str, str] = {}


class CPUSGD(HostOptimizer):
    """SGD on the host with ``torch.optim.SGD``'s arguments and defaults.

    Args:
        params: parameters or parameter groups; paged and ordinary CPU parameters may be mixed.
        lr: learning rate, a number or a tensor with one element.
        momentum, dampening, weight_decay, nesterov, maximize: as in torch. Without momentum there is no state; fp32
            weights then need no transfers but their own.
        foreach, fused: accepted for compatibility; the update always is one fused pass.
        differentiable: must be False.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.

    Raises:
        ValueError: a setting is out of range, or nesterov without momentum or with dampening.
    """

    rule = Rule("CPUSGD", cpu_adam.sgd_step, counts_steps=False)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        checks.host_flags(False, differentiable)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        self._check_settings(defaults)
        super().__init__(params, defaults, max_grad_norm)

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            checks.not_negative(name, group[name])
        dampening = checks.number("dampening", group["dampening"])
        if group["nesterov"] and (float(group["momentum"]) == 0.0 or dampening != 0.0):
            raise ValueError("nesterov=True needs a momentum above zero and zero dampening")

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return _ARRAYS if float(group["momentum"]) else _NOTHING

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> SgdHyper:
        return SgdHyper(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            first=first,
            maximize=bool(group["maximize"]),
        )
