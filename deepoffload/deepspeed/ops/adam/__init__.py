"""``deepspeed.ops.adam``."""

from __future__ import annotations

from typing import Any

from deepoffload.deepspeed.names import submodules
from deepoffload.errors import UnsupportedError
from deepoffload.optim.adam import CPUAdam

DeepSpeedCPUAdam = CPUAdam
"""The same arguments and defaults; ``amsgrad`` works, too."""


class FusedAdam(CPUAdam):
    """:class:`~deepoffload.optim.adam.CPUAdam` with the arguments of DeepSpeed's ``FusedAdam``. It updates where the
    state lies.

    Raises:
        UnsupportedError: ``amsgrad``, as in DeepSpeed's.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise UnsupportedError("FusedAdam has no amsgrad; DeepSpeedCPUAdam(amsgrad=True) has")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode=adam_w_mode)


__getattr__ = submodules(__name__, ("cpu_adam", "fused_adam"), "ops.adam")
