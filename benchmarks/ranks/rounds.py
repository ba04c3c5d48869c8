"""One rank of `python -m benchmarks.ranks rounds`; rank 0 prints the report.

What a round costs: posted and waited for, and posted with some computation before it is needed, as a prefetch is. Next
to it gloo's own 32-byte collectives. Then steps of a model with equal units, with rounds and without (where all ranks
rely on having the same program), in turns: gather and compute forward, gather, compute twice and reduce backward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.end_to_end.meter import read_counters
from benchmarks.ranks.timing import timed
from deepoffload.ranks.exchange import Flight, Reduction
from deepoffload.ranks.group import RankGroup, open_group
from deepoffload.ranks.rounds import Payload, Want, WantKind
from deepoffload.ranks.service import RoundService
from deepoffload.ranks.transport import open_exchange

GRADIENTS = 12
"""Of a unit. The engine sees to rounds when each of them comes."""
WORK_DIM = 128
"""Of the matrices whose product is a piece of computation."""


class Computation:
    """Computes for about so long, on one thread; by its CPU time, so that a busy machine makes it no smaller."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.rand(WORK_DIM, WORK_DIM)
        self._pieces = 1
        self._run()
        begin_s = time.thread_time()
        self._pieces = 200
        self._run()
        self._pieces = max(1, round(seconds / (time.thread_time() - begin_s) * 200))

    def _run(self, part: int = 1) -> None:
        for _ in range(self._pieces // part):
            torch.mm(self._matrix, self._matrix)

    def __call__(self, between: Callable[[], object] = lambda: None, parts: int = 1) -> None:
        """In so many parts; ``between`` is called after each."""
        for _ in range(parts):
            self._run(parts)
            between()


class Model:
    """Units of equal size, on one rank. Whole copies are dropped after each use, as with stage 3 and no room."""

    def __init__(self, group: RankGroup, transport: str, units: int, numel: int) -> None:
        self.units = units
        self.exchange = open_exchange(group, transport)
        ranks = group.ranks
        shard_numel = -(-numel // ranks.world_size // 256) * 256
        whole_numel = shard_numel * ranks.world_size
        self.shard = torch.ones(shard_numel, dtype=torch.bfloat16)
        self.wholes = [torch.zeros(whole_numel, dtype=torch.bfloat16) for _ in range(2)]  # one in use, one on its way
        self.contribution = torch.ones(whole_numel, dtype=torch.bfloat16)
        self.sum = torch.zeros(shard_numel)
        self.reduction = Reduction(tuple(range(ranks.world_size)), shard_numel, torch.bfloat16)
        self.scratch = torch.empty(self.exchange.scratch_bytes(self.reduction), dtype=torch.uint8)
        self.gathers: dict[int, Flight] = {}
        self.served: list[Flight] = []
        self.reductions: list[Any] = []
        self.rounds = RoundService(
            group.client("rounds"), ranks.rank, ranks.world_size, self.launch, str, timeout_s=group.timeout_s
        )

    def launch(self, payload: Payload) -> Flight:
        self.finish_reduction()
        if payload.kind is WantKind.GATHER:
            takes = self.exchange.ranks.rank in payload.ranks
            whole = self.wholes[payload.unit % 2] if takes else None
            flight = self.exchange.gather(self.shard, whole, f"unit {payload.unit}", payload.ranks)
            if takes:
                self.gathers[payload.unit] = flight
            else:  # this rank was slow and has been nudged
                self.served.append(flight)
            return flight
        parts = self.exchange.send_parts(self.contribution, self.reduction, self.scratch, f"unit {payload.unit}")
        self.reductions.append(parts)
        return parts

    def finish_reduction(self) -> None:
        """There is scratch memory for one."""
        while self.reductions:
            flight = self.reductions.pop()
            for start, parts in flight.chunks():
                for part in parts:
                    self.sum[start : start + part.numel()] += part
            flight.release()

    def want(self, kind: WantKind, unit: int, with_rounds: bool) -> None:
        if with_rounds:
            self.rounds.post(Want(kind, unit))
        else:
            self.launch(Payload(kind, unit, self.reduction.contributors))

    def need(self, unit: int, with_rounds: bool) -> None:
        if with_rounds:
            want = Want(WantKind.GATHER, unit)
            self.rounds.wait_launched(want)
            self.rounds.wait_flight(self.gathers[unit], want)
        self.gathers.pop(unit).release()

    def step(self, compute: Computation, with_rounds: bool) -> None:
        forward = list(range(self.units))
        for phase in (forward, forward[::-1]):
            self.want(WantKind.GATHER, phase[0], with_rounds)
            for place, unit in enumerate(phase):
                self.need(unit, with_rounds)
                if place + 1 < self.units:
                    self.want(WantKind.GATHER, phase[place + 1], with_rounds)
                if phase is forward:
                    compute()
                else:
                    for _ in range(2):
                        compute(self.rounds.pump if with_rounds else lambda: None, GRADIENTS // 2)
                    self.want(WantKind.REDUCE, unit, with_rounds)
        if with_rounds:
            self.rounds.meet(WantKind.STEP)
        else:
            dist.barrier()
        self.finish_reduction()
        while self.served:
            self.served.pop().release()


def round_rows(rounds: RoundService, repeats: int, pause: Computation) -> dict[str, Callable[[], None]]:
    numbers = torch.zeros(4, dtype=torch.int64)
    parts = [torch.zeros(4, dtype=torch.int64) for _ in range(dist.get_world_size())]
    wide = torch.zeros(4 * dist.get_world_size(), dtype=torch.int64)
    want = Want(WantKind.GATHER, 0)

    def waited() -> None:
        for _ in range(repeats):
            rounds.post(want)
            rounds.wait_launched(want)

    def ahead() -> None:
        for _ in range(repeats):
            rounds.post(want)
            pause()
            rounds.wait_launched(want)

    def computation_alone() -> None:
        for _ in range(repeats):
            pause()

    def all_gather() -> None:
        for _ in range(repeats):
            dist.all_gather(parts, numbers)

    def all_to_all() -> None:
        for _ in range(repeats):
            dist.all_to_all_single(wide, wide.clone())

    return {
        "round, waited for": waited,
        "computation, a round meanwhile": ahead,
        "computation alone": computation_alone,
        "gloo all_gather, 32 bytes": all_gather,
        "gloo all_to_all, 32 bytes": all_to_all,
    }


def rotated(rows: dict[str, Callable[[], None]], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Each row's times; all rows take turns."""
    names = list(rows)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:
        timed(rows[name])
    for turn in range(turns):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            found[name].append(timed(rows[name]))
    return found


def medians(times: dict[str, list[tuple[float, float]]], repeats: int) -> dict[str, dict[str, float]]:
    return {
        name: {
            "ms": statistics.median(seconds for seconds, _ in rows) / repeats * 1e3,
            "cpu_ms": statistics.median(cpu_s for _, cpu_s in rows) / repeats * 1e3,
        }
        for name, rows in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--compute-ms", type=float, required=True)
    parser.add_argument("--transport", required=True)
    said = parser.parse_args()
    torch.set_num_threads(1)
    group = open_group(torch.device("cpu"), timeout_s=120)
    if group is None:
        raise SystemExit("start it with python -m benchmarks.ranks rounds")
    model = Model(group, said.transport, said.units, int(said.mb * 1e6 / 2))
    bare = RoundService(
        group.client("bare rounds"), group.ranks.rank, group.ranks.world_size, lambda _: None, str, timeout_s=120
    )
    began_s, before = time.perf_counter(), read_counters()
    repeats = 200
    round_times = rotated(round_rows(bare, repeats, Computation(0.002)), said.rounds)
    compute = Computation(said.compute_ms / 1e3)
    steps: dict[str, Callable[[], None]] = {
        "step with rounds": lambda: model.step(compute, True),
        "step without": lambda: model.step(compute, False),
    }
    before_steps = model.rounds.stats()
    step_times = rotated(steps, said.rounds)
    stats = model.rounds.stats()
    used, wall_s, cores = read_counters() - before, time.perf_counter() - began_s, os.cpu_count() or 1
    own_cpu_s = torch.tensor([used.own_cpu_s], dtype=torch.float64)
    dist.all_reduce(own_cpu_s)
    ratios = {
        what: [a[place] / b[place] for a, b in zip(*step_times.values(), strict=True)]
        for place, what in enumerate(("step with rounds / without", "CPU of a step with rounds / without"))
    }
    if group.ranks.rank == 0:
        report = {
            "rows": medians(round_times, repeats) | medians(step_times, 1),
            "ratios": {
                name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
                for name, values in ratios.items()
            },
            "rounds_of_a_step": (stats.rounds - before_steps.rounds) / (said.rounds + 1),
            "mixed_rounds": stats.mixed_rounds,
            "nudges": stats.nudges,
            "ranks": group.ranks.world_size,
            "transport": said.transport,
            "units": said.units,
            "unit_bytes": model.contribution.numel() * 2,
            "compute_ms": said.compute_ms,
            "rounds": said.rounds,
            "cores": cores,
            "foreign_cpu_share": max(0.0, used.busy_cpu_s - float(own_cpu_s)) / wall_s / cores,
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "kernel": platform.release(),
        }
        print(json.dumps(report))
    bare.close()
    model.rounds.close()
    model.exchange.close()
    group.close()


if __name__ == "__main__":
    main()
