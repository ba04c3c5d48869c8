"""One rank of one contender of `python -m benchmarks.ranks training`; prints a JSON line for each step."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gpt import GPT, SHAPES, Shape, fill, tokens_of
from benchmarks.end_to_end.child import Trainer
from benchmarks.end_to_end.meter import read_counters

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01


class Masters:
    """fp32 masters of bf16 weights, and torch's fused AdamW over them."""

    def __init__(self, weights: list[nn.Parameter], work: dict[str, Any]) -> None:
        self.weights, self.clip = weights, work["clip"]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=work["lr"], betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)
        self.optimizer.zero_grad()


def in_bf16(shape: Shape, work: dict[str, Any]) -> GPT:
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(shape, work["seq"])
    torch.set_default_dtype(torch.float32)
    fill(model)
    return model


class Contender:
    """What all that train with torch alone have in common: each makes ``model``, and says what ``update`` does."""

    notes = ""
    model: Any

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def backward(self, loss: Tensor, accumulate: int) -> None:
        (loss / accumulate).backward()

    def finish(self) -> None:
        """Nothing is ever put off."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Ddp(Contender):
    """DistributedDataParallel with bf16 weights, gradients reduced in bf16, and whole fp32 masters on every rank."""

    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> None:
        dist.init_process_group("gloo")
        model = in_bf16(shape, work)
        self.masters = Masters(list(model.parameters()), work)
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def update(self, last: bool) -> None:
        if last:
            self.masters.step()


class Plain(Contender):
    """Forward and backward alone: no rank knows of another one, and nothing is updated. So it shows what a machine
    takes for the same tokens in several processes, without what these have to tell each other."""

    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> None:
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("gloo")  # for the barriers between steps
        self.model = in_bf16(shape, work)

    def update(self, last: bool) -> None:
        if last:
            self.model.zero_grad()


class Fsdp(Contender):
    """FSDP2: fp32 shards, bf16 whole weights, gradients reduced in fp32; optionally ``CPUOffloadPolicy``."""

    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=False) if settings.get("offload") else OffloadPolicy()
        model = GPT(shape, work["seq"])
        fill(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
        self.model = model
        self.clip = work["clip"]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=work["lr"], betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def update(self, last: bool) -> None:
        if last:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def ours(shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> Trainer:
    from benchmarks.end_to_end.side_ours import make

    return make(shape, work, settings, path)


def deepspeed(shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> Trainer:
    from benchmarks.end_to_end.side_deepspeed import make

    return make(shape, work, settings, path)


SIDES: dict[str, Callable[[Shape, dict[str, Any], dict[str, Any], str], Trainer]] = {
    "ours": ours,
    "plain": Plain,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "deepspeed": deepspeed,
}


def micro_batches(trainer: Trainer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """One step. Returns the loss of each micro-batch."""
    if getattr(trainer, "together", False):
        losses = [loss.item() for loss in trainer.accumulate(batches)]
        trainer.update(True)
        return losses
    losses = []
    for micro, (tokens, targets) in enumerate(batches):
        loss = trainer.loss(tokens, targets)
        trainer.backward(loss, len(batches))
        trainer.update(micro == len(batches) - 1)
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    spec = json.loads(parser.parse_args().spec)
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = spec["work"] | {"threads": spec["threads"]}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(work["threads"])
    trainer = SIDES[spec["side"]](SHAPES[work["size"]], work, spec["settings"], spec["path"])
    accumulate = work["accumulate"]
    for step in range(work["warmup"] + work["steps"]):
        numbers = [(step * accumulate + micro) * world_size + rank for micro in range(accumulate)]
        batches = [tokens_of(number, work["batch"] * spec["batch_factor"], work["seq"]) for number in numbers]
        if dist.is_initialized():
            dist.barrier()
        before, began_s = read_counters(), time.perf_counter()
        losses = micro_batches(trainer, batches)
        if dist.is_initialized():
            dist.barrier()
        seconds, used = time.perf_counter() - began_s, read_counters() - before
        found = {
            "seconds": seconds,
            "cpu_s": used.own_cpu_s,
            "busy_cpu_s": used.busy_cpu_s,
            "read_bytes": used.read_bytes,
            "written_bytes": used.written_bytes,
            "loss": sum(losses) / accumulate,
            "stats": trainer.stats(),
        }
        print(json.dumps(found), file=lines)
    trainer.finish()
    trainer.close()


if __name__ == "__main__":
    main()
