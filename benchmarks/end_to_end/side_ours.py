"""deepoffload's side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import deepoffload
from benchmarks.common.gpt import GPT, Shape, fill

CLIPPING = 1e-3
"""A norm that every step exceeds."""


class Ours:
    def __init__(self, shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> None:
        config = dict(settings)
        if config.pop("disk"):
            config["nvme_path"] = path
        self.trace = config.pop("trace", None)
        self.clip, self.clips_every, self.steps = work["clip"], config.pop("clips_every", 0), 0
        self.together = config.get("accumulation_order") == "vertical"
        config["timeline"] = self.trace is not None
        context = deepoffload.offload_context(
            {"gradient_accumulation_steps": work["accumulate"]} | config, precision="bf16"
        )
        with context:
            self.model = GPT(shape, work["seq"])
            fill(self.model)
        self.engine = context.engine
        self.optimizer = deepoffload.CPUAdamW(
            self.model.parameters(), lr=work["lr"], betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=work["clip"]
        )

    def accumulate(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return deepoffload.accumulate(self.model, batches, lambda model, batch: model(*batch))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def backward(self, loss: Tensor, accumulate: int) -> None:
        (loss / accumulate if accumulate > 1 else loss).backward()

    def update(self, last: bool) -> None:
        if last:
            self.steps += 1
            if self.clips_every:  # the limit falls when backward is over: before, guesses look right
                self.optimizer.max_grad_norm = CLIPPING if self.steps % self.clips_every == 0 else self.clip
            self.optimizer.step()
            self.optimizer.max_grad_norm = self.clip
            self.optimizer.zero_grad()

    @property
    def notes(self) -> str:
        """What was placed where, and what the last steps were made of."""
        recorded = [] if self.trace is None else [self.engine.summary(last_steps=4).table()]
        return "\n\n".join([self.engine.placement.table(), *recorded])

    def finish(self) -> None:
        for param in self.model.parameters():
            param.detach().flatten()[0].item()  # a read of a weight sees the finished step

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def close(self) -> None:
        if self.trace is not None:
            self.engine.export_trace(self.trace)
        self.engine.close()


def make(shape: Shape, work: dict[str, Any], settings: dict[str, Any], path: str) -> Ours:
    return Ours(shape, work, settings, path)
