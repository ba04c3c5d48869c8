"""``CPUAdam`` and ``CPUAdamW``: Adam on the host, for paged and ordinary CPU parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdamHyper
from deepoffload.optim import checks
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.rule import Rule

_ARRAYS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_AMSGRAD_ARRAYS = {**_ARRAYS, "max_exp_avg_sq": "max_exp_avg_sq"}


class CPUAdam(HostOptimizer):
    """Adam or AdamW on the host, with DeepSpeedCPUAdam's arguments and defaults.

    Args:
        model_params: parameters or parameter groups; paged and ordinary CPU parameters may be mixed.
        lr: learning rate, a number or a tensor with one element.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        amsgrad: use the largest second moment so far; for ordinary parameters only.
        adamw_mode: True for decoupled weight decay (AdamW), False for L2 (Adam).
        fp32_optimizer_states: only True is accepted: moments are float32.
        maximize: ascend instead of descend.
        max_grad_norm: clip the gradients of all groups together to this global L2 norm inside the update; the norm is
            summed in float64. None: no clipping. ``param.grad`` keeps the unclipped values.

    bf16 weights have an exact fp32 master (the weight is its upper half). fp32 weights are their own master.

    Raises:
        ValueError: a setting is out of range. UnsupportedError: amsgrad for a paged parameter, or 16-bit moments.
    """

    rule = Rule("CPUAdam", cpu_adam.adam_step)

    def __init__(
        self,
        model_params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if not fp32_optimizer_states:
            raise UnsupportedError("fp32_optimizer_states=False is not available; moments are float32")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "adamw_mode": adamw_mode,
            "maximize": maximize,
        }
        self._check_settings(defaults)
        super().__init__(model_params, defaults, max_grad_norm)

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        checks.not_negative("lr", group["lr"])
        checks.two_betas(group["betas"])
        checks.not_negative("eps", group["eps"])
        checks.not_negative("weight_decay", group["weight_decay"])

    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return _AMSGRAD_ARRAYS if group["amsgrad"] else _ARRAYS

    def _hyper(self, group: Mapping[str, Any], step: int, first: bool) -> AdamHyper:
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group["adamw_mode"]),
            step=step,
            bias_correction=bool(group["bias_correction"]),
            maximize=bool(group["maximize"]),
            amsgrad=bool(group["amsgrad"]),
        )

    def _import_group(self, saved: dict[str, Any]) -> dict[str, Any]:
        group = super()._import_group(saved)
        if "adamw_mode" not in saved and "decoupled_weight_decay" in saved:
            group["adamw_mode"] = saved["decoupled_weight_decay"]
        group.pop("decoupled_weight_decay", None)
        return group

    def _export_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "decoupled_weight_decay": group["adamw_mode"]}  # torch's name for it


class CPUAdamW(CPUAdam):
    """AdamW on the host with ``torch.optim.AdamW``'s arguments and defaults, and ``max_grad_norm`` (see
    :class:`CPUAdam`).

    ``foreach`` and ``fused`` are accepted for compatibility; the update always is one fused pass. ``capturable`` and
    ``differentiable`` must be False.
    """

    rule = Rule("CPUAdamW", cpu_adam.adam_step)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        checks.host_flags(capturable, differentiable)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adamw_mode=True,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
        )
