"""``CPUAdam`` and ``CPUAdamW``: ordinary ``torch.optim.Optimizer``s whose update is one fused pass on the host.

They take paged parameters and ordinary CPU parameters side by side. Paged parameters keep their state on whatever
tier the engine placed it; ordinary ones keep it in ``optimizer.state`` as torch's own Adam does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdamHyper, DType, Segment, StateLayout
from deepoffload.optim.gradients import NATIVE_DTYPES, Gradients
from deepoffload.optim.state import LAYOUTS
from deepoffload.optim.update import HostUpdate
from deepoffload.params.pager import Pager, pager_of
from deepoffload.params.unit import ParamHandle


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW on the host, with DeepSpeedCPUAdam's arguments and defaults.

    Args:
        model_params: parameters or parameter groups; paged and ordinary CPU parameters may be mixed.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        amsgrad: only False is accepted.
        adamw_mode: True for decoupled weight decay (AdamW), False for L2 (Adam).
        fp32_optimizer_states: only True is accepted: moments are float32.
        maximize: ascend instead of descend.
        max_grad_norm: clip the gradients of all groups together to this global L2 norm inside the update; the norm is
            summed in float64. None: no clipping. ``param.grad`` keeps the unclipped values.

    Attributes:
        skip_non_finite: :meth:`step` changes nothing when a gradient holds an infinity or NaN. Off unless set.
        applied: whether the last :meth:`step` updated.
        grad_norm: global L2 norm of the gradients at the last step, unclipped; None when nothing needed it.

    bf16 weights have an exact fp32 master (the weight is its upper half). fp32 weights are their own master.

    Raises:
        ValueError: a setting is out of range. UsageError: parameters of two engines.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
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
        if amsgrad:
            raise UnsupportedError("amsgrad=True is not available; use amsgrad=False")
        if not fp32_optimizer_states:
            raise UnsupportedError("fp32_optimizer_states=False is not available; moments are float32")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        _check(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adamw_mode": adamw_mode,
            "maximize": maximize,
        }
        super().__init__(model_params, defaults)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self.skip_non_finite = False
        self.applied = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; refuses settings out of range and parameters that are not on the CPU."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for param in group["params"]:
                if param.device.type != "cpu":
                    raise UsageError(
                        f"CPUAdam updates parameters on the CPU; one of shape {tuple(param.shape)} is on {param.device}"
                    )
        except ValueError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also ends what an interrupted forward left open, so that every gradient is seen."""
        for pager in {id(pager): pager for pager in self._pagers()}.values():
            pager.close_leaked()
        super().zero_grad(set_to_none)

    def _pagers(self) -> Iterator[Pager]:
        for group in self.param_groups:
            for param in group["params"]:
                slot = param.__dict__.get("_slot")
                if isinstance(slot, ParamHandle):
                    yield pager_of(slot)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.applied = self.apply_step(unscale=1.0, skip_non_finite=self.skip_non_finite)
        return loss

    @torch.no_grad()
    def apply_step(self, *, unscale: float, skip_non_finite: bool) -> bool:
        """The update with gradients multiplied by ``unscale`` first.

        Returns False, with nothing changed, when ``skip_non_finite`` is set and a gradient holds an infinity or NaN.
        """
        paged, plain, pagers = self._with_gradients()
        for pager in pagers:
            pager.close_leaked()
        grad_factor, finite = self._grad_factor(paged, plain, unscale, skip_non_finite)
        if skip_non_finite and not finite:
            for pager in pagers:
                pager.end_of_step()
            return False
        hypers = {handle: self._hyper(param, group) for handle, param, group in paged}
        plain_hypers = [(param, self._hyper(param, group)) for param, group in plain]
        for pager in pagers:
            mine = {handle: hyper for handle, hyper in hypers.items() if handle.pager is pager}
            HostUpdate(pager, _gradients(pager)).run(mine, grad_factor)
            pager.end_of_step()
        _step_plain(plain_hypers, self.state, grad_factor)
        return True

    # -- inside ----------------------------------------------------------------------------------------------------

    def _with_gradients(
        self,
    ) -> tuple[list[tuple[ParamHandle, Tensor, dict[str, Any]]], list[tuple[Tensor, dict[str, Any]]], list[Pager]]:
        paged: list[tuple[ParamHandle, Tensor, dict[str, Any]]] = []
        plain: list[tuple[Tensor, dict[str, Any]]] = []
        pagers: dict[int, Pager] = {}
        for group in self.param_groups:
            for param in group["params"]:
                handle = param.__dict__.get("_slot")
                if isinstance(handle, ParamHandle):
                    pager = pager_of(handle)
                    pagers[id(pager)] = pager
                    if pager.closed_because is not None:
                        pager.refuse_closed(handle.name)
                    if _gradients(pager).present(handle):
                        paged.append((handle, param, group))
                elif param.grad is not None:
                    _check_plain(param)
                    plain.append((param, group))
        return paged, plain, list(pagers.values())

    def _grad_factor(self, paged: list[Any], plain: list[Any], unscale: float, need_finite: bool) -> tuple[float, bool]:
        """Unscale times clip factor (as ``torch.nn.utils.clip_grad_norm_`` defines it), and whether all is finite."""
        if self.max_grad_norm is None and not need_finite:
            self.grad_norm = None
            return unscale, True
        total = 0.0
        finite = True
        by_unit = sorted(paged, key=lambda entry: entry[0].unit.index if entry[0].unit is not None else -1)
        for handle, _, _ in by_unit:
            squares, bad = _gradients(handle.pager).sum_of_squares(handle)
            total += squares
            finite &= not bad
        for param, _ in plain:
            grad = param.grad.contiguous()
            squares, bad = (
                cpu_adam.sum_of_squares(
                    grad.data_ptr(), grad.numel(), dtype=NATIVE_DTYPES[grad.dtype], num_threads=torch.get_num_threads()
                )
                if grad.numel()
                else (0.0, False)
            )
            total += squares
            finite &= not bad
        norm = math.sqrt(total) * abs(unscale) if math.isfinite(total) else math.inf if finite else math.nan
        self.grad_norm = norm
        if self.max_grad_norm is None or not math.isfinite(norm):
            return unscale, finite
        return unscale * min(1.0, self.max_grad_norm / (norm + 1e-6)), finite

    def _hyper(self, param: Tensor, group: dict[str, Any]) -> AdamHyper:
        state = self.state[param]
        step = int(state.get("step", 0)) + 1
        state["step"] = torch.tensor(float(step))
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
        )


class CPUAdamW(CPUAdam):
    """AdamW on the host with ``torch.optim.AdamW``'s arguments and defaults, and ``max_grad_norm`` (see
    :class:`CPUAdam`).

    ``foreach``, ``capturable``, ``differentiable`` and ``fused`` are accepted as torch's defaults (None or False); the
    update always is one fused pass.
    """

    def __init__(
        self,
        params: Iterable[Any],
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
        if capturable or differentiable:
            raise UnsupportedError("capturable=True and differentiable=True have no meaning for an update on the host")
        super().__init__(
            params,
            lr=lr,  # type: ignore[arg-type]
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adamw_mode=True,
            maximize=maximize,
            max_grad_norm=max_grad_norm,
        )


def _check(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if not float(lr) >= 0.0:
        raise ValueError(f"lr must not be negative, got {lr}")
    if not all(0.0 <= beta < 1.0 for beta in betas) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")


def _gradients(pager: Pager) -> Gradients:
    gradients = pager.gradients
    if not isinstance(gradients, Gradients):
        raise UsageError("the optimizer was used inside offload_context; step after the context has ended")
    return gradients


def _check_plain(param: Tensor) -> None:
    grad = param.grad
    if grad is not None and (grad.is_sparse or grad.dtype not in NATIVE_DTYPES or param.dtype not in NATIVE_DTYPES):
        raise UnsupportedError(
            f"CPUAdam updates dense float32, bfloat16 and float16 parameters; one of shape {tuple(param.shape)} is "
            f"{param.dtype} with a {'sparse ' if grad.is_sparse else ''}{grad.dtype} gradient"
        )


def _step_plain(items: list[tuple[Tensor, AdamHyper]], states: Any, grad_factor: float) -> None:
    """Ordinary CPU parameters: the same pass, with the state in ``optimizer.state``."""
    for layout in StateLayout:
        segments: list[Segment] = []
        hypers: list[AdamHyper] = []
        keep: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for param, hyper in items:
            if LAYOUTS[param.dtype] is not layout or param.numel() == 0:
                continue
            state = states[param]
            _init_plain(param, state, layout)
            weight = param.detach()
            if not weight.is_contiguous():
                weight = weight.contiguous()
                copies.append((param, weight))
            grad = param.grad.contiguous()  # type: ignore[union-attr]
            keep += [weight, grad]
            hypers.append(hyper)
            segments.append(
                Segment(
                    numel=param.numel(),
                    hyper_index=len(hypers) - 1,
                    grad=grad.data_ptr(),
                    grad_dtype=NATIVE_DTYPES[grad.dtype],
                    weight=weight.data_ptr(),
                    weight_dtype=DType(NATIVE_DTYPES[param.dtype]),
                    remainder=state["remainder"].data_ptr() if layout is StateLayout.SPLIT_BF16 else 0,
                    master=state["master"].data_ptr() if layout is StateLayout.MASTER else 0,
                    exp_avg=state["exp_avg"].data_ptr(),
                    exp_avg_sq=state["exp_avg_sq"].data_ptr(),
                )
            )
        if segments:
            cpu_adam.adam_step(segments, hypers, layout, grad_factor=grad_factor, num_threads=torch.get_num_threads())
        for param, weight in copies:
            param.copy_(weight)


def _init_plain(param: Tensor, state: dict[str, Any], layout: StateLayout) -> None:
    if "exp_avg" in state:
        return
    state["exp_avg"] = torch.zeros(param.shape, dtype=torch.float32)
    state["exp_avg_sq"] = torch.zeros(param.shape, dtype=torch.float32)
    if layout is StateLayout.SPLIT_BF16:
        state["remainder"] = torch.zeros(param.shape, dtype=torch.int16)
    if layout is StateLayout.MASTER:
        state["master"] = param.detach().float().contiguous()
