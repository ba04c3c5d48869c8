"""One placement in a process of its own: steps in both orders, in turns, and what the estimators predict of them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, astuple
from typing import Any

import torch
from torch import Tensor

import deepoffload
from benchmarks.accumulation.bound import moves_of
from benchmarks.common.gpt import SHAPES, tokens_of
from benchmarks.end_to_end.cases import Work, ours
from benchmarks.end_to_end.meter import read_counters
from benchmarks.end_to_end.side_ours import Ours
from benchmarks.estimate.steps import Moment, between, moment, subject_of
from deepoffload.config import AccumulationOrder, Config, Precision, parse_config
from deepoffload.estimate import estimate
from deepoffload.estimate.measure import measure_machine

ORDERS = ("horizontal", "vertical")
WARM_UP = 2
"""Steps that teach the engine its trace, after every change of the order."""


class Row:
    """The model in one placement."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said, self._number = said, 0
        self._work = Work(said["size"], 1, said["seq"], threads=said["threads"], clip=said["clip"])
        name = f"{said['row']}-{said['overlap']}"
        self._case = next(case for case in ours(self._work, said["overlap"]) if case.name == name)
        self._subject = subject_of(self._work)
        self._before = self._machine = self._run = None
        if said["predict"]:  # before there is a model: memory of a process is measured, too
            self._machine = measure_machine(said["path"])
            self._run = estimate(self._subject, self._machine, self._config(1)).run
        self._side = Ours(SHAPES[said["size"]], asdict(self._work), self._case.settings, said["path"])
        self.num_params = self._work.num_parameters

    def _config(self, count: int) -> Config:
        settings = {key: value for key, value in self._case.settings.items() if key != "disk"}
        order, path = AccumulationOrder.VERTICAL, [self._said["path"]]
        return parse_config(
            settings | {"accumulation_order": order.value},
            precision=Precision.BF16,
            nvme_path=path,
            gradient_accumulation_steps=count,
        )

    def measure(self, count: int) -> dict[str, Any]:
        """Steps of ``count`` micro-batches: by order, a list for each round."""
        rounds: dict[str, list[Any]] = {order: [] for order in ORDERS}
        before = self._now() if self._run is not None else None
        for _ in range(self._said["rounds"]):
            for order in ORDERS:
                steps = [self._step(order, count) for _ in range(WARM_UP + self._said["steps"])]
                rounds[order].append(steps[WARM_UP:])
        found: dict[str, Any] = {"row": self._said["row"], "k": count, "rounds": rounds}
        if before is not None:
            now = between(before, self._now())
            found["predicted"] = self._predicted(now, count)
            found["rates"] = astuple(now.machine.bandwidths())
            if self._said["overlap"] == "deferred":
                found["moves"] = self._moves(count)
        return found

    def _moves(self, count: int) -> dict[str, Any]:
        """By order: how often a step goes through units, and what it moves. See ``benchmarks.accumulation.bound``"""
        passes = {"horizontal": count, "vertical": 1}
        moves = {order: moves_of(self._side.engine.placement, passes[order]) for order in ORDERS}
        return {
            order: (passes[order], astuple(one.update), astuple(one.rest), one.passing_bytes)
            for order, one in moves.items()
        }

    def _now(self) -> Moment:
        assert self._machine is not None and self._run is not None
        return moment(self._machine, self._run, self._said["path"])

    def _predicted(self, now: Moment, count: int) -> dict[str, Any]:
        """Seconds and bytes per parameter of a step, by order."""
        found = estimate(self._subject, now.machine, self._config(count), time_ops=lambda run: now.ops)
        steps = {found.order: found.step}
        if found.other_order is not None:
            steps[found.other_order.order] = found.other_order.step
        return {
            order.value: {
                "seconds": step.seconds,
                "bytes": (step.times.read_bytes + step.times.written_bytes) / self.num_params,
            }
            for order, step in steps.items()
            if step is not None
        }

    def _step(self, order: str, count: int) -> dict[str, float]:
        self._number += 1
        batches = [tokens_of(self._number * count + micro, 1, self._said["seq"]) for micro in range(count)]
        forward_s = 0.0

        def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            nonlocal forward_s
            started_s = time.perf_counter()
            found: Tensor = model(*batch)
            forward_s += time.perf_counter() - started_s
            return found

        before, stats, begin_s = read_counters(), self._side.stats(), time.perf_counter()
        losses = deepoffload.accumulate(self._side.model, batches, loss_of, order=order)
        update_begin_s = time.perf_counter()
        self._side.update(last=True)
        end_s, used, now = time.perf_counter(), read_counters() - before, self._side.stats()
        seconds = end_s - begin_s
        return {
            "seconds": seconds,
            "forward_s": forward_s,  # in vertical order forwards wait for each other
            "update_s": end_s - update_begin_s,
            "bytes": (used.read_bytes + used.written_bytes) / self.num_params,
            "wait_s": now["wait_s"] - stats["wait_s"],
            "faults": now["faults"] - stats["faults"],
            "foreign_cpu_share": max(0.0, used.busy_cpu_s - used.own_cpu_s) / seconds / (os.cpu_count() or 1),
            "loss": float(losses[-1]),
        }

    def close(self) -> None:
        self._side.close()


def main() -> None:
    said = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout as they like
    torch.set_num_threads(said["threads"])
    row = Row(said)
    for count in said["micro_batches"]:
        print(json.dumps(row.measure(count)), file=lines)
    row.close()


if __name__ == "__main__":
    main()
