"""Models of many kinds, trained with updates on a guess and in the serial order: the same bits.

``python -m tests.optim.speculation_matrix DIRECTORY --cells 300`` draws so many cells of families, budgets, types,
checkpoints, accumulation, parts that are trained, and steps that clip. Each prints how many units were guessed, and how
many of these were undone.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import deepoffload
from tests.models.matrix import ONE_UNIT
from tests.models.programs import add_lora, checkpoints
from tests.models.zoo import FAMILIES
from tests.optim.deferred import sorted_state
from tests.optim.speculation_campaign import said_on_the_command_line
from tests.support.loops import assert_same_bits, weights_of
from tests.support.paging import EVICTING, ROOMY, TIGHT, Paging, Setting

STEPS = 7
CLIPPED = {"never": (), "always": range(STEPS), "sometimes": (3, 5)}
"""Which of the steps clip."""

WHOLE, FROZEN, LORA, UNUSED = "whole", "partly frozen", "LoRA", "unused layer"


@dataclass(frozen=True)
class Cell:
    """``reentrant``: the kind of activation checkpoints, None without. ``part``: what of the model is trained."""

    family: str
    setting: Setting
    precision: str = "bf16"
    reentrant: bool | None = None
    accumulate: int = 1
    clips: str = "sometimes"
    part: str = WHOLE

    def __str__(self) -> str:
        checkpoints = {None: "", False: " checkpoints", True: " reentrant checkpoints"}[self.reentrant]
        what = f"{self.family} {self.part} {self.setting} {self.precision} k={self.accumulate}{checkpoints}"
        return f"{what}, clips {self.clips}"

    def build(self) -> Any:
        family = FAMILIES[self.family]
        model: Any = family.build()
        if self.part == LORA:
            return add_lora(family, model)
        if self.part == UNUSED:
            model.add_module("never_called", nn.Linear(16, 16))
        if self.part == FROZEN:
            for number, param in enumerate(model.parameters()):
                param.requires_grad_(number % 3 > 0)
        return model

    def run(self, paging: Paging, step_overlap: str) -> tuple[Any, dict[str, float]]:
        """All that training leaves, and the statistics."""
        setting = replace(self.setting, precision=self.precision, step_overlap=step_overlap)
        model = paging.build(self.build, setting, key=(self.family, self.part))
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = deepoffload.CPUAdamW(trained, lr=1e-2, weight_decay=0.1)
        torch.manual_seed(7)
        seen: list[Any] = []
        with checkpoints(model, self.reentrant):
            for step in range(STEPS):
                optimizer.max_grad_norm = 1e9
                for micro in range(self.accumulate):
                    loss = FAMILIES[self.family].loss(model, 10 * step + micro) / self.accumulate
                    loss.backward()
                    seen.append(loss.detach().clone())
                if step in CLIPPED[self.clips]:
                    optimizer.max_grad_norm = 1e-4  # known after backward: the guesses are wrong
                optimizer.step()
                optimizer.zero_grad()
                seen.append(torch.tensor(optimizer.grad_norm))
        return [seen, weights_of(model), sorted_state(optimizer)], deepoffload.stats(model)

    def compare(self, paging: Paging) -> dict[str, float]:
        """Raises AssertionError for the first bit that differs. Returns the statistics of the run with guesses."""
        expected, _ = self.run(paging, "none")
        got, stats = self.run(paging, "speculative")
        assert_same_bits(expected, got, f"{self} ", nan_is_wrong=self.precision != "fp16")
        return stats


def drawn(dice: random.Random) -> Cell:
    family = FAMILIES[dice.choice(list(FAMILIES))]
    parts = [WHOLE, FROZEN, UNUSED, *([LORA] if family.is_transformer else [])]
    finite = family.name != "parametrizations"  # an orthogonal weight's gradient is NaN in fp16
    cell = Cell(
        family.name,
        dice.choice((ONE_UNIT, TIGHT, ROOMY, EVICTING)),
        dice.choice(("keep", "bf16", "fp16") if finite else ("keep", "bf16")),
        dice.choice((None, None, False, True)),
        dice.choice((1, 3)),
        dice.choice(list(CLIPPED)),
        dice.choice(parts),
    )
    return replace(cell, reentrant=None) if cell.part == LORA else cell


def main() -> int:
    with said_on_the_command_line(__doc__, "cells", 300) as said:
        dice, wrong = random.Random(said.seed), 0
        for _ in range(said.count):
            cell = drawn(dice)
            try:
                stats = cell.compare(said.paging)
            except AssertionError as difference:
                wrong += 1
                print(cell, "DIFFERS", difference, flush=True)
            else:
                print(f"{cell}: same; {stats['speculated']:.0f} kept, {stats['rolled_back']:.0f} undone", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
