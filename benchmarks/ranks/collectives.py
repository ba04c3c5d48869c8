"""One rank of `python -m benchmarks.ranks collectives`; rank 0 prints the report.

The ordered reduction is what a unit's owner does with it: parts in bf16, added up in rank order in fp32 by the landing
kernel, to their mean. The peers are what DDP (all_reduce) and FSDP2 (reduce_scatter) do with gradients in fp32; their
conversion from bf16 is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.end_to_end.meter import read_counters
from benchmarks.ranks.timing import timed
from deepoffload.native import cpu_adam
from deepoffload.native.aio import HostMapping
from deepoffload.ranks.exchange import Exchange, Reduction
from deepoffload.ranks.group import RankGroup, open_group
from deepoffload.ranks.group_exchange import GroupExchange
from deepoffload.ranks.sums import mean_scale
from deepoffload.ranks.transport import open_exchange

Row = Callable[[], None]
GATHERS = {"gather by group": "gloo all_gather bf16", "gather by memory": "gloo all_gather bf16"}
RATIOS = [
    *GATHERS.items(),
    *(
        (f"ordered reduction by {transport}", peer)
        for transport in ("group", "memory")
        for peer in ("gloo reduce_scatter fp32", "gloo all_reduce fp32")
    ),
]


def on_huge_pages(numel: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    """Memory as all that is managed lies in; for the peers, too."""
    mapping = HostMapping(numel * dtype.itemsize)
    return torch.frombuffer(mapping.buffer, dtype=dtype, count=numel).fill_(value)


class Unit:
    """One unit's tensors on this rank, and the rows that move them."""

    def __init__(self, numel: int, group: RankGroup) -> None:
        self.world_size, self.rank = group.ranks.world_size, group.ranks.rank
        self.shard_numel = numel // self.world_size
        self.numel = self.shard_numel * self.world_size
        self.shard = on_huge_pages(self.shard_numel, torch.bfloat16, 1)
        self.whole = on_huge_pages(self.numel, torch.bfloat16, 0)
        self.contribution = on_huge_pages(self.numel, torch.bfloat16, 1)
        self.mean = on_huge_pages(self.shard_numel, torch.float32, 0)
        self.wide = on_huge_pages(self.numel, torch.float32, 1)
        self.wide_part = on_huge_pages(self.shard_numel, torch.float32, 0)

    def gather(self, exchange: Exchange) -> None:
        exchange.gather(self.shard, self.whole, "the unit").release()

    def reduce(self, exchange: Exchange, scratch: torch.Tensor, reduction: Reduction) -> None:
        flight = exchange.send_parts(self.contribution, reduction, scratch, "the unit")
        for start, parts in flight.chunks():
            cpu_adam.land_parts(
                self.mean.data_ptr() + start * self.mean.element_size(),
                [part.data_ptr() for part in parts],
                parts[0].numel(),
                dtype=cpu_adam.DType.BF16,
                scale=mean_scale(self.world_size),
                accumulate=False,
                num_threads=1,
            )
        flight.release()

    def check(self) -> None:
        if not bool((self.whole == 1).all()) or not bool((self.mean == 1).all()):
            raise SystemExit("a row has moved wrong bytes")


def rows_of(unit: Unit, exchanges: dict[str, Exchange]) -> dict[str, Row]:
    reduction = Reduction(tuple(range(unit.world_size)), unit.shard_numel, torch.bfloat16)
    rows: dict[str, Row] = {
        "gloo all_gather bf16": lambda: dist.all_gather_into_tensor(unit.whole, unit.shard),
        "gloo reduce_scatter fp32": lambda: dist.reduce_scatter_tensor(unit.wide_part, unit.wide),
        "gloo all_reduce fp32": lambda: dist.all_reduce(unit.wide),
    }
    for name, exchange in exchanges.items():
        scratch = on_huge_pages(exchange.scratch_bytes(reduction), torch.uint8, 0)

        def gather(exchange: Exchange = exchange) -> None:
            unit.gather(exchange)

        def reduce(exchange: Exchange = exchange, scratch: torch.Tensor = scratch) -> None:
            unit.reduce(exchange, scratch, reduction)

        rows[f"gather by {name}"] = gather
        rows[f"ordered reduction by {name}"] = reduce
    return rows


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    said = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    group = open_group(torch.device("cpu"), timeout_s=120)
    if group is None:
        raise SystemExit("start it with python -m benchmarks.ranks collectives")
    exchanges = {"group": GroupExchange(group), "memory": open_exchange(group, "memory")}
    unit = Unit(int(said.mb * 1e6 / 2), group)
    rows = rows_of(unit, exchanges)
    for row in rows.values():
        timed(row)
    unit.check()
    names = list(rows)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    began_s, before = time.perf_counter(), read_counters()
    for number in range(said.rounds):
        # What a row finds in the caches depends on the one before it; all ranks draw the same order.
        for name in random.Random(number).sample(names, len(names)):
            took_s, used_s = timed(rows[name])
            seconds[name].append(took_s)
            cpu[name].append(used_s)
    used, wall_s, cores = read_counters() - before, time.perf_counter() - began_s, os.cpu_count() or 1
    own_cpu_s = torch.tensor([used.own_cpu_s], dtype=torch.float64)
    dist.all_reduce(own_cpu_s)
    unit.check()
    if group.ranks.rank == 0:
        report = {
            "rows": {
                name: {"ms": statistics.median(seconds[name]) * 1e3, "cpu_ms": statistics.median(cpu[name]) * 1e3}
                for name in names
            },
            "ratios": {
                f"{ours} / {peer}": spread([a / b for a, b in zip(seconds[ours], seconds[peer], strict=True)])
                for ours, peer in RATIOS
            },
            "ranks": unit.world_size,
            "unit_bytes": unit.numel * 2,
            "rounds": said.rounds,
            "cores": cores,
            "foreign_cpu_share": max(0.0, used.busy_cpu_s - float(own_cpu_s)) / wall_s / cores,
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "kernel": platform.release(),
        }
        print(json.dumps(report))
    for exchange in exchanges.values():
        exchange.close()
    group.close()


if __name__ == "__main__":
    main()
