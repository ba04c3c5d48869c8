"""DeepSpeed's own ZeRO engine around a bag of matrices, from autograd's gradients to the new weights.

Nothing of it is imitated: ``land`` calls what the hooks that DeepSpeed puts on gradients call, for each parameter, and
what it calls at the end of a backward; ``step`` is its optimizer's. One rank, optimizer on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

# Before DeepSpeed is imported: it looks at them then.
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", DS_LOG_LEVEL="error")

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks.common.launch import free_port


class Bag(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(shape)) for shape in shapes)


def start() -> None:
    """One rank."""
    os.environ["MASTER_PORT"] = str(free_port())
    deepspeed.init_distributed("gloo")


class Zero:
    """bf16 weights of these shapes under ZeRO stage 2 or 3, clipped to ``clip_norm``."""

    def __init__(self, stage: int, shapes: list[tuple[int, int]], lr: float, clip_norm: float) -> None:
        threads = torch.get_num_threads()
        model = Bag(shapes)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clip_norm,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.zero: Any = self.engine.optimizer
        self.stage = stage
        self.params = list(model.parameters())
        torch.set_num_threads(threads)  # it takes its own number

    def prepare(self, grads: list[Tensor]) -> None:
        """As things are when a backward has made these gradients."""
        if self.stage == 3:
            self.params[0].all_gather(self.params)  # type: ignore[attr-defined]
        else:
            self.zero.setup_buckets()
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.zero.micro_step_id = 0

    @torch.no_grad()
    def land(self) -> None:
        for param in reversed(self.params):
            group = () if self.stage == 3 else (0,)
            self.zero.reduce_ready_partitions_and_remove_grads(param, *group)
        if self.stage == 3:
            self.zero.independent_gradient_partition_epilogue()
        else:
            self.zero.overlapping_partition_gradients_reduce_epilogue()

    def step(self) -> None:
        self.zero.step()

    def close(self) -> None:
        self.engine.destroy()
