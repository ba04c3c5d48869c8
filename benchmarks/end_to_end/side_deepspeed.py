"""DeepSpeed's ZeRO on its CPU accelerator, as one of the ranks that a launcher describes, or alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from benchmarks.common.launch import free_port

if "RANK" not in os.environ:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
# Before DeepSpeed is imported: it looks at them then.
os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])

import deepspeed
import torch
from torch import Tensor

from benchmarks.common.gpt import GPT, Shape, fill


class DeepSpeed:
    """Stage 3, if ``settings`` says nothing else."""

    notes = ""
    together = False

    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="deepspeed-", dir=path)
        config = self._config(work, settings)
        deepspeed.init_distributed("gloo")
        if config["zero_optimization"]["stage"] == 3:
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = GPT(shape, work["seq"])
            fill(model, gathered=lambda param: deepspeed.zero.GatheredParameters([param], modifier_rank=0))
        else:
            model = GPT(shape, work["seq"])
            fill(model)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        torch.set_num_threads(work["threads"])

    def _config(self, work: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        zero = {"stage": 3, **settings["zero"]}
        for key in ("offload_optimizer", "offload_param"):
            if zero.get(key, {}).get("device") == "nvme":
                zero[key] = {**zero[key], "nvme_path": self.folder}
        adam = {"lr": work["lr"], "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
        return {
            "train_micro_batch_size_per_gpu": work["batch"],
            "gradient_accumulation_steps": work["accumulate"],
            "gradient_clipping": work["clip"] or 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": zero,
            **({"aio": settings["aio"]} if "aio" in settings else {}),
        }

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.engine(tokens, targets)

    def backward(self, loss: Tensor, accumulate: int) -> None:
        self.engine.backward(loss)

    def update(self, last: bool) -> None:
        self.engine.step()

    def finish(self) -> None:
        """Its step ends with the weights."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def make(shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> DeepSpeed:
    return DeepSpeed(shape, work, settings, path)
