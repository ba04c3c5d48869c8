"""Step time and bytes of both orders of accumulation, in turns in one process::

    python -m benchmarks.accumulation --path /mnt/nvme --size 319m --host-budget 1.5GiB --micro-batches 1 4 16

Each round makes some steps in one order, of which the first ones teach the engine its trace, and as many in the other.
The last column is the vertical order's time as a part of the ordinary order's, from the medians of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import deepoffload
from benchmarks.common.gpt import GPT, SHAPES, fill, tokens_of
from benchmarks.end_to_end.meter import read_counters

ORDERS = ("horizontal", "vertical")
WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accumulation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--path", required=True, help="directory on the disk that is measured")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--host-budget", default="1.5GiB")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seq", type=int, default=128, help="tokens in a micro-batch, which has one row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured ones, in each round and order")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="where to write what was measured")
    return parser.parse_args()


class Side:
    """The model and what one step of it costs."""

    def __init__(self, said: argparse.Namespace) -> None:
        self.seq, self.step = said.seq, 0
        with deepoffload.offload_context(
            host_budget=said.host_budget, nvme_path=said.path, precision="bf16"
        ) as context:
            self.model = GPT(SHAPES[said.size], said.seq)
            fill(self.model)
        self.engine = context.engine
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-4, max_grad_norm=1.0)
        self.num_params = sum(param.numel() for param in self.model.parameters())

    def measure(self, order: str, micro_batches: int) -> dict[str, Any]:
        """One step."""
        self.step += 1
        batches = [tokens_of(self.step * micro_batches + micro, 1, self.seq) for micro in range(micro_batches)]
        before, begin_s = read_counters(), time.perf_counter()
        losses = deepoffload.accumulate(self.model, batches, lambda model, batch: model(*batch), order=order)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, used = time.perf_counter() - begin_s, read_counters() - before
        moved = (used.read_bytes + used.written_bytes) / self.num_params
        return {"order": order, "k": micro_batches, "seconds": seconds, "bytes": moved, "loss": float(losses[-1])}


def main() -> None:
    said = arguments()
    torch.set_num_threads(said.threads)
    side, measured = Side(said), []
    print(f"{side.num_params / 1e6:.0f} M parameters, {said.host_budget} of host memory, {said.threads} threads")
    print(f"{'k':>3} {'horizontal s':>14} {'B/param':>8} {'vertical s':>14} {'B/param':>8} {'ratio':>7}")
    for count in said.micro_batches:
        rows: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
        for _ in range(said.rounds):
            for order in ORDERS:
                steps = [side.measure(order, count) for _ in range(WARM_UP + said.steps)]
                rows[order] += steps[WARM_UP:]
        measured += [row for order in ORDERS for row in rows[order]]
        seconds = [statistics.median(row["seconds"] for row in rows[order]) for order in ORDERS]
        moved = [statistics.median(row["bytes"] for row in rows[order]) for order in ORDERS]
        columns = (
            f"{seconds[0]:14.3f} {moved[0]:8.1f} {seconds[1]:14.3f} {moved[1]:8.1f} {seconds[1] / seconds[0]:7.2f}"
        )
        print(f"{count:3d} {columns}", flush=True)
    if said.json:
        with open(said.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(said), "steps": measured}, file, indent=1)


if __name__ == "__main__":
    main()
