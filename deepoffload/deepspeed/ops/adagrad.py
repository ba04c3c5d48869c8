"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from typing import Any

from deepoffload.errors import UnsupportedError
from deepoffload.optim.adagrad import CPUAdagrad


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """:class:`~deepoffload.optim.adagrad.CPUAdagrad` with DeepSpeed's arguments, in its order. ``amsgrad`` is accepted,
    and used by neither.

    Raises:
        UnsupportedError: ``fp32_optimizer_states=False``.
    """

    def __init__(
        self,
        model_params: Any,
        lr: Any = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise UnsupportedError(
                "DeepSpeedCPUAdagrad(fp32_optimizer_states=False): sums of squares are kept in fp32; leave it out"
            )
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)
