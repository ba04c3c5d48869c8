"""Who trains: each side builds the model its own way and makes whole steps, clipped to a norm of 1."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.launch import free_port

PATTERN_NUMEL = 1 << 22
"""Values that are drawn; the rest of a model repeats them."""

LR, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.01, 1.0

Build = Callable[[], nn.Module]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Small values that bf16 can hold, the same on all sides, in the time that it takes to write them: a generator of
    the CPU draws 100 million a second, and models here have billions."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.empty(PATTERN_NUMEL).normal_(std=0.02, generator=generator).bfloat16()
    for param in model.parameters():
        if param.dim() < 2:
            param.fill_(1.0)
            continue
        repeats = -(-param.numel() // PATTERN_NUMEL)
        values = pattern if repeats == 1 else pattern.repeat(repeats)
        param.copy_(values[: param.numel()].view(param.shape))


class Side:
    """Makes steps of one optimizer."""

    model: nn.Module
    optimizer: Any

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.model(tokens, targets)
        loss.backward()
        self.update()
        return float(loss.detach())

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stats(self) -> dict[str, Any]:
        return {}

    def disk_bytes(self) -> tuple[int, int] | None:
        """Read and written since the beginning; None where nobody counts them."""
        return None


class Plain(Side):
    """bf16 weights over fp32 masters, torch's fused AdamW, all on the device: 18 bytes per parameter."""

    def __init__(self, build: Build, device: torch.device, settings: dict[str, Any], path: str) -> None:
        self.model = build()
        fill(self.model)
        self.model.to(device)
        self.masters = [param.detach().clone() for param in self.model.parameters()]
        self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def update(self) -> None:
        weights = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
        factor = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
        for master, weight in zip(self.masters, weights, strict=True):
            master.grad = weight.grad.float().mul_(factor)
            weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(weights, self.masters)


class Ours(Side):
    def __init__(self, build: Build, device: torch.device, settings: dict[str, Any], path: str) -> None:
        import deepoffload

        settings = dict(settings)
        if settings.pop("disk", False):
            settings["nvme_path"] = path
        settings.setdefault("memory_may_grow", True)  # rows that the machine cannot hold are left out before
        with deepoffload.offload_context(settings, precision="bf16", device=str(device)) as context:
            self.model = build()
            fill(self.model)
        self.engine: Any = context.engine
        self.optimizer = deepoffload.CPUAdamW(
            self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=CLIP
        )

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stats(self) -> dict[str, Any]:
        return {"stats": self.engine.stats(), "placement": self.engine.placement.table()}

    def disk_bytes(self) -> tuple[int, int] | None:
        found = self.engine.stats()
        return found["disk_bytes_read"], found["disk_bytes_written"]


class Fsdp2(Side):
    """``fully_shard`` over one process with ``CPUOffloadPolicy``, fp32 masters on the CPU, bf16 on the device."""

    def __init__(self, build: Build, device: torch.device, settings: dict[str, Any], path: str) -> None:
        from torch.distributed import HashStore, init_process_group
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        init_process_group(backend, store=HashStore(), rank=0, world_size=1)  # one process needs no network
        self.model = build()
        fill(self.model)
        offload, precision = CPUOffloadPolicy(), MixedPrecisionPolicy(torch.bfloat16)
        policy: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload}
        for block in self.model.blocks:
            fully_shard(block, **policy)
        fully_shard(self.model, **policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )


class TorchAo(Side):
    """torchao's ``CPUOffloadOptimizer`` with gradients offloaded: weights stay on the device, in bf16, without masters.
    It cannot clip to a norm."""

    def __init__(self, build: Build, device: torch.device, settings: dict[str, Any], path: str) -> None:
        from torchao.optim import CPUOffloadOptimizer

        self.model = build()
        fill(self.model)
        self.model.to(device, torch.bfloat16)
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=True,
            lr=LR,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed(Side):
    """ZeRO-3 with optimizer state and gradients in pinned host memory."""

    def __init__(self, build: Build, device: torch.device, settings: dict[str, Any], path: str) -> None:
        # Where nobody says which rank this is, DeepSpeed asks mpi4py.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
        }
        model = build()
        fill(model)
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.model(tokens, targets)
        self.model.backward(loss)
        self.model.step()
        return float(loss.detach())


SIDES: dict[str, Any] = {"plain": Plain, "ours": Ours, "fsdp2": Fsdp2, "torchao": TorchAo, "deepspeed": DeepSpeed}
