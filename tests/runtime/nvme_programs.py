"""Random models, some of them largely frozen, each trained at the least ``nvme_budget`` that is accepted.

``python -m tests.runtime.nvme_programs DIRECTORY 200 [first seed]`` runs so many, and says what went wrong. The
directory must be empty.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepoffload
from deepoffload.errors import BudgetError
from deepoffload.native.aio import PAGE_BYTES
from tests.support.seeds import run_seeds

STEPS = 4
FIRST_BUDGET_BYTES = 16 << 10
AMPLE_BYTES = 64 << 20

ATTEMPTS = 4
"""With parameters that are unfrozen later, which nobody knows of before: each error names what is enough of one kind of
memory for what is known then."""


class Adapted(nn.Module):
    """A layer with a low-rank adapter next to it."""

    def __init__(self, width: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, hidden).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """Layers of changing width, of which ``frozen`` is about the frozen part; with a ``rank``, all but their
    adapters are."""

    def __init__(self, chance: random.Random, frozen: float, rank: int) -> None:
        super().__init__()
        self.inputs = width = chance.choice((16, 32, 64, 128))
        self.layers = nn.ModuleList()
        for _ in range(chance.randint(2, 10)):
            wider = chance.choice((width, width, 16, 32, 64, 128, 256))
            layer = Adapted(width, wider, rank) if rank else nn.Linear(width, wider)
            self.layers.append(layer.requires_grad_(False) if not rank and chance.random() < frozen else layer)
            width = wider
        if not any(param.requires_grad for param in self.parameters()):
            self.layers[-1].requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.float().square().mean()


@dataclass(frozen=True)
class Program:
    """What is done with the model, drawn from ``seed``.

    Attributes:
        room: the host budget, as a multiple of the least that is accepted with ample NVMe.
        unfreezes: all that is frozen, after some steps.
    """

    seed: int
    precision: str
    overlap: str
    prefetch: bool
    durable: bool
    frozen: float
    rank: int
    room: float
    optimizer: str
    unfreezes: bool

    @staticmethod
    def drawn(seed: int) -> Program:
        chance = random.Random(seed)
        return Program(
            seed=seed,
            precision=chance.choice(("keep", "bf16", "bf16", "fp16")),
            overlap=chance.choice(("deferred", "none", "in_backward")),
            prefetch=chance.random() < 0.8,
            durable=chance.random() < 0.25,
            frozen=chance.choice((0.0, 0.5, 0.8, 0.95)),
            rank=chance.choice((0, 0, 4, 8)),
            room=chance.choice((1.0, 1.0, 1.1, 1.3, 2.0, 3.0)),
            optimizer=chance.choice(("CPUAdamW", "CPUAdamW", "CPULion", "CPUSGD")),
            unfreezes=chance.random() < 0.2,
        )

    @contextmanager
    def _built(self, directory: str, host_bytes: int, nvme_bytes: int) -> Iterator[Net]:
        """The model; afterwards its directory is empty again, but always the same one, whose disk is known."""
        overlap = "deferred" if self.precision == "fp16" and self.overlap == "in_backward" else self.overlap
        with deepoffload.offload_context(
            host_budget=host_bytes,
            nvme_budget=nvme_bytes,
            nvme_path=directory,
            precision=self.precision,
            step_overlap=overlap,
            prefetch=self.prefetch,
            debug={"poison": True},
            **({"durability": {"every": 1}} if self.durable else {}),
        ) as context:
            torch.manual_seed(self.seed)
            model = Net(random.Random(self.seed), self.frozen, self.rank)
        assert context.engine is not None
        try:
            yield model
        finally:
            context.engine.close()
            for name in os.listdir(directory):
                os.unlink(os.path.join(directory, name))

    def refusal(self, directory: str, host_bytes: int, nvme_bytes: int) -> BudgetError | None:
        """Why the model is refused with these budgets; None when it is not."""
        try:
            with self._built(directory, host_bytes, nvme_bytes):
                return None
        except BudgetError as error:
            return error

    def host_bytes(self, directory: str) -> int:
        """The host budget of this program."""
        refusal = self.refusal(directory, FIRST_BUDGET_BYTES, AMPLE_BYTES)
        least = FIRST_BUDGET_BYTES if refusal is None else refusal.enough_bytes
        assert least is not None, f"{self} is refused without a budget that is enough: {refusal}"
        return int(least * self.room)

    def least_nvme_bytes(self, directory: str, host_bytes: int) -> int:
        """The least NVMe that is accepted, as the first refusal names it."""
        refusal = self.refusal(directory, host_bytes, PAGE_BYTES)
        if refusal is None:
            return PAGE_BYTES
        named = refusal.enough_nvme_bytes
        assert named is not None and f"nvme_budget to at least {named} bytes" in str(refusal), f"{self}: {refusal}"
        again = self.refusal(directory, host_bytes, named)
        assert again is None, f"{self} is refused with the {named} bytes of NVMe that were named: {again}"
        less = self.refusal(directory, host_bytes, named - PAGE_BYTES)
        assert less is not None, f"{self} is accepted with less than the {named} bytes of NVMe that were named"
        return named

    def train(self, directory: str, host_bytes: int, nvme_bytes: int) -> list[float]:
        """Some steps. Raises what a user would see."""
        with self._built(directory, host_bytes, nvme_bytes) as model:
            return self._steps(model)

    def _steps(self, model: Net) -> list[float]:
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = getattr(deepoffload, self.optimizer)(trained, lr=1e-3)
        state = deepoffload.TrainingState(model, optimizer) if self.durable else None
        data = torch.Generator().manual_seed(self.seed)
        losses = []
        for step in range(STEPS):
            x = torch.randn(4, model.inputs, generator=data).to(trained[0].dtype)
            loss = model(x)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if state is not None:
                state.commit()
            if self.unfreezes and step == 1:
                frozen = [param for param in model.parameters() if not param.requires_grad]
                model.requires_grad_(True)
                if frozen:
                    optimizer.add_param_group({"params": frozen})
        return losses


def run(program: Program, directory: str) -> str | None:
    """What goes wrong with a program, None when nothing does."""
    try:
        host_bytes = program.host_bytes(directory)
        nvme_bytes = program.least_nvme_bytes(directory, host_bytes)
    except AssertionError as error:
        return str(error)
    expected = program.train(directory, AMPLE_BYTES, AMPLE_BYTES)
    failure = ""
    for _ in range(ATTEMPTS if program.unfreezes else 1):
        try:
            losses = program.train(directory, host_bytes, nvme_bytes)
        except BudgetError as error:
            failure = f"{program} ends with {host_bytes} bytes, {nvme_bytes} of NVMe: {type(error).__name__} {error}"
            host_bytes = error.enough_bytes or host_bytes
            nvme_bytes = error.enough_nvme_bytes or nvme_bytes
        else:
            return None if losses == expected else f"{program} trains to {losses}, not {expected}"
    return failure


def main(directory: str, count: int, first: int = 0, say: Callable[[str], None] = print) -> int:
    return run_seeds(lambda seed: run(Program.drawn(seed), directory), count, first, say)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], *map(int, sys.argv[2:])), 1))
