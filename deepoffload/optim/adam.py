"""``CPUAdam`` and ``CPUAdamW``: Adam on the host, for paged and ordinary CPU parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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
        amsgrad: use the largest second moment so far (one fp32 array more).
        adamw_mode: True for decoupled weight decay (AdamW), False for L2 (Adam).
        fp32_optimizer_states: False is DeepSpeed's way to say ``state_dtype="bf16"``.
        maximize: ascend instead of descend.
        state_dtype: what the moments are stored in: ``"fp32"``; ``"bf16"``, rounded after every step; or ``"8bit"``, a
            byte each and a scale per 256 of them (docs/optimizers.md has the numerics). The update computes in fp32.
            Not together with amsgrad. It may differ between groups; a loaded state does not change it.
        master_weights: False: bf16 weights have no fp32 master, each update is rounded to nearest even and small ones
            are lost, as with ``torch.optim``; for ordinary parameters only.
        max_grad_norm: clip the gradients of all groups together to this global L2 norm inside the update; the norm is
            summed in float64. None: no clipping. ``param.grad`` keeps the unclipped values.

    A bf16 weight is its fp32 master rounded to nearest even; an int16 remainder completes it (docs/how_it_works.md). An
    fp16 weight has a separate fp32 master. fp32 weights are their own master.

    Raises:
        ValueError: a setting is out of range. UnsupportedError: no master weights for paged parameters.
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
        state_dtype: str = "fp32",
        master_weights: bool = True,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "adamw_mode": adamw_mode,
            "maximize": maximize,
            "state_dtype": state_dtype if fp32_optimizer_states else "bf16",
            "master_weights": master_weights,
        }
        self._check_settings(defaults)
        super().__init__(model_params, defaults, max_grad_norm)

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        checks.not_negative("lr", group["lr"])
        checks.two_betas(group["betas"])
        checks.not_negative("eps", group["eps"])
        checks.not_negative("weight_decay", group["weight_decay"])
        checks.state_dtype(group["state_dtype"], *checks.STATE_DTYPES)
        if group["amsgrad"] and group["state_dtype"] != "fp32":
            raise ValueError(f"amsgrad=True needs state_dtype='fp32', not {group['state_dtype']!r}")

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
            state_dtype=checks.STATE_DTYPES[group["state_dtype"]],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group may say ``adamw_mode`` or, as torch does, ``decoupled_weight_decay``."""
        if isinstance(param_group, dict) and "decoupled_weight_decay" in param_group:
            param_group = dict(param_group)
            decoupled = param_group.pop("decoupled_weight_decay")
            param_group.setdefault("adamw_mode", decoupled)
        super().add_param_group(param_group)

    def _import_group(self, saved: dict[str, Any]) -> dict[str, Any]:
        group = super()._import_group(saved)
        if "adamw_mode" not in saved and "decoupled_weight_decay" in saved:
            group["adamw_mode"] = saved["decoupled_weight_decay"]
        group.pop("decoupled_weight_decay", None)
        return group

    def _export_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "decoupled_weight_decay": group["adamw_mode"]}  # torch's name for it


class CPUAdamW(CPUAdam):
    """AdamW on the host with ``torch.optim.AdamW``'s arguments and defaults, and ``state_dtype``, ``master_weights``
    and ``max_grad_norm`` (see :class:`CPUAdam`).

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
        state_dtype: str = "fp32",
        master_weights: bool = True,
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
            state_dtype=state_dtype,
            master_weights=master_weights,
            max_grad_norm=max_grad_norm,
        )
