"""Training with different numbers of batches, and what has to come out: one process that adds the same gradients."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.ranks.sums import mean_scale
from deepoffload.runtime.context import engine_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.rank_processes import LONG_S

LR = 1e-2


@dataclass(frozen=True)
class Uneven:
    """A run.

    Attributes:
        epochs: in each, how many batches every rank has.
        every: batches between steps.
        clear_first: gradients are cleared before a step's first backward, and looked at after the step.
        schedule: the learning rate falls with each step.
        edited: the program writes the weights before each epoch.
        clip: the norm that gradients are clipped to.
        turns: two optimizers, each with a half of the parameters, step by turns.
    """

    epochs: tuple[tuple[int, ...], ...]
    every: int = 1
    clear_first: bool = False
    schedule: bool = False
    clip: float | None = 1.0
    turns: bool = False
    edited: bool = False
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What a run has shown; values as bytes, which processes can send without sharing memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    looked_at: dict[int, bytes] = field(default_factory=dict)
    weights: dict[str, bytes] = field(default_factory=dict)
    gradients: dict[str, bytes] = field(default_factory=dict)


def bits(tensor: Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.detach().contiguous().clone().view(torch.uint8).numpy().tobytes()


class Trainer:
    """A model with its optimizers and schedules, and the loop's own steps."""

    def __init__(self, run: Uneven, model: nn.Module) -> None:
        self.run, self.model, self.found = run, model, Found()
        params = list(model.parameters())
        halves = [params[::2], params[1::2]] if run.turns else [params]
        self.optimizers = [CPUAdamW(half, lr=LR, max_grad_norm=run.clip) for half in halves]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in self.optimizers]
        self.steps = 0

    def loss(self, epoch: int, number: int, reader: int) -> Tensor:
        return next_token_loss(self.model, batch(1000 * epoch + 10 * number + reader))

    def step(self) -> None:
        optimizer = self.optimizers[self.steps % len(self.optimizers)]
        optimizer.step()
        if self.run.clear_first:
            self.found.looked_at[self.steps] = bits(next(iter(optimizer.param_groups[0]["params"])).grad)
        else:
            optimizer.zero_grad()
        self.after_step()

    def after_step(self) -> None:
        self.found.norms.append(self.optimizers[self.steps % len(self.optimizers)].grad_norm)
        self.steps += 1
        if self.run.schedule:
            for schedule in self.schedules:
                schedule.step()

    def edit(self) -> None:
        if self.run.edited:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.copy_(torch.linspace(-0.1, 0.1, param.numel()).view_as(param))

    def look(self) -> Found:
        for name, param in self.model.named_parameters():
            self.found.weights[name] = bits(param)
            if param.grad is not None:
                self.found.gradients[name] = bits(param.grad)
        return self.found


def paged(config: dict[str, Any], path: str) -> nn.Module:
    torch.manual_seed(11)
    with offload_context({**config, **({"nvme_path": path} if "nvme_budget" in config else {})}):
        model = TinyGPT(dropout=0.0)
    return model


def train(run: Uneven, path: str) -> tuple[Found, dict[str, float]]:
    """Run by each rank."""
    rank = int(os.environ["RANK"])
    trainer = Trainer(run, paged(run.config, path))
    for epoch, counts in enumerate(run.epochs):
        trainer.edit()
        with deepoffload.join(trainer.model, after_step=trainer.after_step):
            for number in range(counts[rank]):
                if run.clear_first and number % run.every == 0:
                    for optimizer in trainer.optimizers:
                        optimizer.zero_grad()
                loss = trainer.loss(epoch, number, rank)
                loss.backward()
                trainer.found.losses.append(float(loss.detach()))
                if (number + 1) % run.every == 0:
                    trainer.step()
    found = trainer.look()
    stats = deepoffload.stats(trainer.model)
    engine_of(trainer.model).close()
    return found, stats


def train_all(runs: list[Uneven], path: str) -> list[tuple[Found, dict[str, float]]]:
    return [train(run, path) for run in runs]


def add(param: Tensor, grad: Tensor, scale: float) -> None:
    """Add a rank's part of a gradient with the kernel that lands it."""
    total = torch.zeros_like(param) if param.grad is None else param.grad
    cpu_adam.land_parts(
        total.data_ptr(),
        [grad.data_ptr()],
        grad.numel(),
        dtype=DType.FP32,
        scale=scale,
        accumulate=param.grad is not None,
        num_threads=1,
    )
    param.grad = total


def expected(run: Uneven) -> tuple[Found, list[list[float]]]:
    """One process with an ordinary model: what all ranks find, and the losses of each."""
    torch.manual_seed(11)
    trainer = Trainer(run, TinyGPT(dropout=0.0))
    params = list(trainer.model.parameters())
    ranks = len(run.epochs[0])
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for epoch, counts in enumerate(run.epochs):
        trainer.edit()
        for number in range(max(counts)):
            if run.clear_first and number % run.every == 0:
                trainer.model.zero_grad()
            for reader in [rank for rank in range(ranks) if number < counts[rank]]:
                loss = trainer.loss(epoch, number, reader)
                for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    add(param, grad.contiguous(), mean_scale(ranks))
                losses[reader].append(float(loss.detach()))
            if (number + 1) % run.every == 0:
                trainer.step()
        if run.clear_first and max(counts) % run.every == 0:
            trainer.model.zero_grad()  # the end of a join clears what has made a step
    return trainer.look(), losses


# -- one rank does something else ----------------------------------------------------------------------------------


def do_wrong(what: str, path: str) -> float:
    """Rank 0 has one batch and rank 1 has four. Returns the seconds from the end of rank 0's batches to the error."""
    rank = int(os.environ["RANK"])
    trainer = Trainer(Uneven(((1, 4),)), paged({"host_budget": "64MiB", "ranks": {"timeout_s": LONG_S}}, path))
    pids = engine_of(trainer.model).agreement.gather(os.getpid(), "process numbers")
    begin = time.monotonic()
    try:
        with deepoffload.join(trainer.model):
            for number in range(1 + 3 * rank):
                trainer.loss(0, number, rank).backward()
                if number == 2:
                    disturb(what, trainer, pids)
                begin = time.monotonic()
                trainer.optimizers[0].step()
                if what != "keeps its gradients":
                    trainer.optimizers[0].zero_grad()
    except BaseException as error:
        seconds = time.monotonic() - begin
        raise type(error)(f"{error} ({seconds:.1f} s)") from error
    return time.monotonic() - begin


def disturb(what: str, trainer: Trainer, pids: list[int]) -> None:
    if what == "raises":
        raise ValueError("the data loader has found a broken file")
    if what == "clips":
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
    if what == "edits":
        with torch.no_grad():
            list(trainer.model.parameters())[1].clamp_(-0.01, 0.01)
    if what == "interrupts":
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGINT)
    if what == "copies its optimizer":
        trainer.optimizers.insert(0, CPUAdamW(trainer.model.parameters(), lr=LR))


def join_with_torch_optimizer(path: str) -> None:
    model = paged({"host_budget": "64MiB"}, path)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with deepoffload.join(model):
        optimizer.step()


# -- DeepSpeed's manner ----------------------------------------------------------------------------------------------


def train_engine(counts: tuple[int, ...], precision: str) -> dict[str, Any]:
    """An engine with accumulation, a schedule, clipping, and in fp16 a scale that overflows at first."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": LR}},
        "host_budget": "64MiB",
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
    model = TinyGPT(dropout=0.0)
    engine, _, _, _ = deepoffload.initialize(model=model, config=config)
    for epoch in range(2):
        with engine.join():
            for number in range(counts[rank] if world_size > 1 else 0):
                engine.backward(next_token_loss(engine, batch(100 * epoch + 10 * number + rank)))
                engine.step()
    return {
        "weights": {name: bits(param) for name, param in engine.named_parameters()},
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale,
        "lr": engine.get_lr(),
        "norm": engine.get_global_grad_norm(),
    }
