"""What paging costs when nothing has to move: `python -m benchmarks.paging`.

The same model, plain and paged with a budget that holds everything, in turns: 24 blocks of 8 leaf modules with tiny
weights, so that the time is that of Python. Reported is the difference per leaf module, in microseconds: of a forward
under ``no_grad``, of a forward that records a graph, and of forward and backward with gradients landing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import deepoffload

BLOCKS = 24
LEAVES = 8
WIDTH = 16


class Block(nn.Module):
    """Eight leaf modules, two parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LEAVES))

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x)
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def forward_without_graph(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def forward(model: nn.Module, x: Tensor) -> None:
    model(x)


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    for param in model.parameters():
        param.grad = None


PROGRAMS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "no_grad forward": forward_without_graph,
    "forward": forward,
    "forward and backward": forward_and_backward,
}


def seconds(program: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor, repeats: int) -> float:
    program(model, x)  # after the other model's turn nothing of this one is in the caches
    start = time.perf_counter()
    for _ in range(repeats):
        program(model, x)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="also write the report to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(2, WIDTH)
    plain = build()
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as path:
        with deepoffload.offload_context(host_budget="64MiB", nvme_path=path):
            paged = build()
        for name, program in PROGRAMS.items():
            for model in (plain, paged):
                seconds(program, model, x, 3)
            rounds = [
                (seconds(program, plain, x, arguments.repeats), seconds(program, paged, x, arguments.repeats))
                for _ in range(arguments.rounds)
            ]
            leaves = BLOCKS * LEAVES
            report[name] = {
                "plain_us_per_leaf": statistics.median(a for a, _ in rounds) / leaves * 1e6,
                "added_us_per_leaf": statistics.median(b - a for a, b in rounds) / leaves * 1e6,
            }
        del paged
    print(json.dumps(report, indent=2))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
