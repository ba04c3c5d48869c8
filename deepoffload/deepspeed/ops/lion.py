"""``deepspeed.ops.lion``."""

from __future__ import annotations

from typing import Any

from deepoffload.optim.lion import CPULion

DeepSpeedCPULion = CPULion


class FusedLion(CPULion):
    """:class:`~deepoffload.optim.lion.CPULion` with the arguments of DeepSpeed's ``FusedLion``."""

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
