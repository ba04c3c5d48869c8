"""Random models and training programs, each run at the least budget that is accepted for it.

``python -m tests.runtime.budget_programs DIRECTORY 500 [first seed]`` runs so many, and says what went wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepoffload
from deepoffload.errors import BudgetError, PlacementError
from deepoffload.memory.no_room import Hold
from deepoffload.native.aio import PAGE_BYTES
from tests.support.seeds import run_seeds

STEPS = 10
FIRST_BUDGET_BYTES = 16 << 10

RING_BYTES = 256 << 10
"""What the way of gradients from a device takes of a small budget."""

ATTEMPTS = 2
"""With views that a program keeps across steps: the second one has the budget that the error of the first one names."""


class LayerScale(nn.Module):
    """Views of a small weight among large layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.gelu(self.fc1(x))) * self.gamma.reshape(1, -1)


class Sliced(nn.Module):
    """One large weight of which the forward takes slices and a transpose, and its own layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.both = nn.Parameter(torch.randn(2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both.chunk(2)
        return x + torch.sigmoid(self.inner(x) @ gate.t()) * functional.linear(x, value)


class Normed(nn.Module):
    """Small layers by themselves, and weights of a child used from outside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.LayerNorm(width), nn.Linear(width, hidden), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.layer(self.before(x)) @ self.layer.weight * self.before.weight[None])


class Twice(nn.Module):
    """The same layer called twice, one of them below a checkpoint."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, hidden), nn.Linear(hidden, width)])

    def _inner(self, x: Tensor) -> Tensor:
        return self.layers[1](functional.relu(self.layers[0](x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self._inner(torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=False))


class Attention(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.position = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        given = (x + self.position.view(-1))[None]
        return x + self.attention(given, given, given, need_weights=False)[0][0]


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x[None])[0][0]


BLOCKS = (LayerScale, Sliced, Normed, Twice, Attention, Recurrent)


class Net(nn.Module):
    """Embedding, blocks of changing width, and a head that may be the embedding, by module or by transpose."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        width = chance.choice((8, 16, 32, 64))
        self.embed = nn.Embedding(chance.choice((20, 200)), width)
        blocks: list[nn.Module] = []
        for _ in range(chance.randint(1, 3)):
            kind, hidden = chance.choice(BLOCKS), width * chance.choice((1, 2, 4))
            blocks += [kind(width, hidden) for _ in range(chance.randint(1, 3))]
            if chance.random() < 0.4:
                wider = chance.choice((8, 48, 96, 160))
                blocks.append(nn.Linear(width, wider))
                width = wider
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=False)
        self.ties = chance.choice(("none", "module", "transpose")) if width == self.embed.embedding_dim else "none"
        if self.ties == "module":
            self.head.weight = self.embed.weight
        if chance.random() < 0.2:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens))
        logits = x @ self.embed.weight.t() if self.ties == "transpose" else self.head(x)
        return functional.cross_entropy(logits.float(), tokens)


@dataclass(frozen=True)
class Program:
    """What is done with the model, drawn from ``seed``.

    Attributes:
        spare: the budget, as a multiple of the least that is accepted.
        holds: what the program keeps: views of weights across steps, or a graph that is never used.
    """

    seed: int
    precision: str
    overlap: str
    prefetch: bool
    micro_batches: int
    clips: bool
    evaluates: bool
    looks_at_gradients: bool
    holds: str
    optimizer: str
    nvme: bool
    spare: float
    device: str

    @staticmethod
    def drawn(seed: int, device: str = "cpu") -> Program:
        chance = random.Random(seed)
        return Program(
            device=device,
            seed=seed,
            precision=chance.choice(("fp32", "bf16")),
            overlap=chance.choice(("deferred", "deferred", "none")),
            prefetch=chance.random() < 0.8,
            micro_batches=chance.randint(1, 3),
            clips=chance.random() < 0.5,
            evaluates=chance.random() < 0.3,
            looks_at_gradients=chance.random() < 0.2,
            holds=chance.choice(("nothing", "nothing", "views", "a graph")),
            optimizer=chance.choice(("CPUAdamW", "CPUAdamW", "CPULion", "CPUSGD", "AdamW")),
            nvme=chance.random() < 0.85,
            spare=chance.choice((1.0, 1.0, 1.0, 1.1, 1.3)),
        )

    def build(self) -> Net:
        torch.manual_seed(self.seed)
        return Net(random.Random(self.seed))

    def context(self, directory: str, budget_bytes: int) -> Any:
        return deepoffload.offload_context(
            host_budget=budget_bytes,
            precision=self.precision,
            step_overlap=self.overlap,
            prefetch=self.prefetch,
            device=self.device,
            debug={"poison": True},
            **({"nvme_path": directory} if self.nvme else {}),
        )

    def accepted(self, directory: str, budget_bytes: int) -> BudgetError | None:
        """None when the model can be built in so much memory, else the refusal."""
        try:
            with self.context(directory, budget_bytes) as context:
                model = self.build()
        except BudgetError as error:
            return error
        context.engine.close()
        del model
        return None

    def least_bytes(self, directory: str) -> int:
        """The least budget that is accepted, as the first refusal names it."""
        first = FIRST_BUDGET_BYTES + (0 if self.device == "cpu" else RING_BYTES)
        refusal = self.accepted(directory, first)
        if refusal is None:
            return first
        named = refusal.enough_bytes
        assert named is not None, f"{self} is refused without a budget that is enough: {refusal}"
        again = self.accepted(directory, named)
        assert again is None, f"{self} is refused with the {named} bytes that were named: {again}"
        less = self.accepted(directory, named - PAGE_BYTES)
        assert less is not None, f"{self} is accepted with less than the {named} bytes that were named"
        return named

    def train(self, directory: str, budget_bytes: int) -> list[float]:
        """Ten steps. Raises what a user would see."""
        with self.context(directory, budget_bytes) as context:
            model = self.build()
        try:
            return self._steps(model)
        finally:
            context.engine.close()

    def _steps(self, model: Net) -> list[float]:
        rates = {"lr": 1e-3}
        trained = [p for p in model.parameters() if p.requires_grad]
        kind = torch.optim.AdamW if self.optimizer == "AdamW" else getattr(deepoffload, self.optimizer)
        optimizer = kind(trained, **rates)
        data = torch.Generator().manual_seed(self.seed)

        def tokens() -> Tensor:
            return torch.randint(0, 20, (6,), generator=data).to(self.device)

        losses = []
        held: dict[str, Any] = {}
        for step in range(STEPS):
            for _ in range(self.micro_batches):
                loss = model(tokens()) / self.micro_batches
                loss.backward()
                losses.append(float(loss.detach()))
            if self.looks_at_gradients:
                sums = [float(p.grad.abs().sum()) for p in trained if p.grad is not None]
                assert all(value == value for value in sums)
            if self.clips:
                nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if self.holds == "views" and step < 2:
                held["views"] = [p.detach()[:1] for p in [p for p in model.parameters() if p.dim() == 1][:3]]
            if self.holds == "a graph":
                held["graph"] = [model(tokens())]
            if self.evaluates and step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    model(tokens())
                model.train()
        return losses


def run(seed: int, directory: str, device: str = "cpu") -> str | None:
    """What goes wrong with the program of ``seed``, None when nothing does.

    Views that a program keeps across steps are known to nobody before. An error that names them, and a budget with
    which the program trains, is right then.
    """
    program = Program.drawn(seed, device)
    try:
        budget = int(program.least_bytes(directory) * program.spare)
    except AssertionError as error:
        return str(error)
    for _ in range(ATTEMPTS if program.holds == "views" else 1):
        try:
            losses = program.train(directory, budget)
        except PlacementError as error:
            return f"{program} was accepted with {budget} bytes and then not: {error}"
        except BudgetError as error:
            failure = f"{program} ends in training with {budget} bytes: {error}"
            if error.enough_bytes is None or Hold.REFERRED_TO.value not in str(error):
                return failure
            budget = error.enough_bytes
        else:
            return None if all(loss == loss for loss in losses) else f"{program} trains to NaN with {budget} bytes"
    return failure


def main(directory: str, count: int, first: int = 0, say: Callable[[str], None] = print, *, device: str = "cpu") -> int:
    return run_seeds(lambda seed: run(seed, directory, device), count, first, say)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], *map(int, sys.argv[2:])), 1))
