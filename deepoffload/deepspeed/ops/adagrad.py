"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from deepoffload.optim.adagrad import CPUAdagrad

DeepSpeedCPUAdagrad = CPUAdagrad
