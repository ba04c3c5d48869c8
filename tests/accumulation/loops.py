"""The same steps several ways: a plain loop of backwards, and ``accumulate`` in both orders, with activations kept and
computed again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from tests.support.loops import gradients_of, weights_of

PLAIN, HORIZONTAL, VERTICAL = "plain", "horizontal", "vertical"
HORIZONTAL_AGAIN, VERTICAL_AGAIN = "horizontal, recompute", "vertical, recompute"
"""Without a second word activations are kept."""

LossOf = Callable[[Any, Any], Tensor]
BatchOf = Callable[[int], Any]


def draw_seeds(count: int) -> list[int]:
    """The seeds that ``accumulate`` draws, one for each micro-batch."""
    seeds: list[int] = torch.randint((1 << 63) - 1, (count,), device="cpu").tolist()
    return seeds


def plain_accumulation(model: Any, batches: list[Any], loss_of: LossOf) -> list[Tensor]:
    """What ``accumulate`` stands for: backwards one after the other, each micro-batch with its own seed."""
    seeds, losses = draw_seeds(len(batches)), []
    device: Any = torch.accelerator.current_accelerator()
    there: Any = None if device is None else torch.get_device_module(device)
    program, of_device = torch.get_rng_state(), None if there is None else there.get_rng_state()
    for seed, batch in zip(seeds, batches, strict=True):
        torch.manual_seed(seed)
        loss = loss_of(model, batch)
        losses.append(loss.detach())
        narrow = loss.dtype in (torch.float16, torch.bfloat16) and len(batches) > 1
        ((loss.float() if narrow else loss) / len(batches)).backward()
    torch.set_rng_state(program)
    if there is not None:
        there.set_rng_state(of_device)
    return losses


def accumulate(model: Any, batches: list[Any], loss_of: LossOf, how: str) -> list[Tensor]:
    """``deepoffload.accumulate`` in one of the ways above."""
    order, _, activations = how.partition(", ")
    return deepoffload.accumulate(model, batches, loss_of, order=order, activations=activations or "keep")


@dataclass
class Steps:
    """Which steps are made.

    Attributes:
        around: entered around each accumulation (autocast).
        optimizer: of the model; the update clips to a norm of 0.5 where it can.
    """

    loss_of: LossOf
    batch_of: BatchOf
    micro_batches: int = 3
    steps: int = 2
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    seen: list[Any] = field(default_factory=list)

    def run(self, model: nn.Module, how: str, optimizer: Any = None) -> dict[str, Any]:
        """Losses, norms, the gradients of the last step, the weights after it, and what the generators then draw."""
        model.train()
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = optimizer or deepoffload.CPUAdamW(trained, lr=1e-2, max_grad_norm=0.5)
        torch.manual_seed(5)
        losses, norms, gradients = [], [], {}
        for step in range(self.steps):
            batches = [self.batch_of(100 * step + micro) for micro in range(self.micro_batches)]
            with self.around():
                if how == PLAIN:
                    losses += plain_accumulation(model, batches, self.loss_of)
                else:
                    losses += accumulate(model, batches, self.loss_of, how)
            gradients = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(getattr(optimizer, "grad_norm", None))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        drawn = [torch.rand(4, device=device) for device in ("cpu", trained[0].device)]
        return {
            "losses": losses,
            "norms": norms,
            "gradients": gradients,
            "weights": weights_of(model),
            "buffers": buffers,
            "drawn": drawn,
        }
