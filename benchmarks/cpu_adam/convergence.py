"""Does a small GPT learn as well with stored states (8 bits, bf16) as with fp32 ones, and as with others?

    python -m benchmarks.cpu_adam.convergence --steps 400 --seeds 0 1

Trains a GPT of 0.85 M parameters on the characters of Python's own library, once for each optimizer and seed, from the
same weights on the same batches, and prints the loss of the last 50 steps and that of held-out text. Those of torchao
and bitsandbytes take part where they are installed (pip install -e ".[bench-peers]"; both work without a GPU). The
JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload

CHARACTERS, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 64, 128, 4, 4, 16
LR, WEIGHT_DECAY, WARM_UP, CLIP = 2e-3, 0.1, 50, 1.0
LAST = 50
"""Steps over which the training loss is averaged."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions.weight)))


def library_text() -> tuple[Tensor, Tensor]:
    """Characters to train on, and held-out ones."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:800_000]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp_max(CHARACTERS - 1)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def sample(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    return torch.stack([data[i : i + CONTEXT] for i in starts]), torch.stack(
        [data[i + 1 : i + CONTEXT + 1] for i in starts]
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def contenders() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    ours = deepoffload.CPUAdamW
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch AdamW fp32": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=WEIGHT_DECAY),
        "ours fp32": lambda p: ours(p, lr=LR, weight_decay=WEIGHT_DECAY),
        "ours 8bit": lambda p: ours(p, lr=LR, weight_decay=WEIGHT_DECAY, state_dtype="8bit"),
        "ours bf16": lambda p: ours(p, lr=LR, weight_decay=WEIGHT_DECAY, state_dtype="bf16"),
    }
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda p: bitsandbytes.optim.AdamW8bit(p, lr=LR, weight_decay=WEIGHT_DECAY)
    if importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        found["torchao AdamW8bit"] = lambda p: AdamW8bit(p, lr=torch.tensor(LR), weight_decay=WEIGHT_DECAY)
    return found


def train(make: Callable[[Any], torch.optim.Optimizer], steps: int, seed: int) -> dict[str, float]:
    learnt, held_out = library_text()
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        lr = LR * min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        loss = loss_of(model, sample(learnt, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        held = statistics.fmean(loss_of(model, sample(held_out, generator)).item() for _ in range(40))
    return {"training_loss": statistics.fmean(losses[-LAST:]), "held_out_loss": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "convergence.json")
    options = parser.parse_args()
    rows = []
    print(f"{'':26s} seed  training  held out")
    for name, make in contenders().items():
        for seed in options.seeds:
            row = {"optimizer": name, "seed": seed, **train(make, options.steps, seed)}
            rows.append(row)
            print(f"{name:26s} {seed:4d} {row['training_loss']:9.4f} {row['held_out_loss']:9.4f}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"steps": options.steps, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
