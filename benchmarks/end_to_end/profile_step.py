"""What our own Python takes of a training step: planner, hooks and faults next to kernels, torch and waiting.

    python -m benchmarks.end_to_end.profile_step --path /mnt/nvme --case host all

A stopwatch that belongs to one part at a time: the functions of ``PARTS`` hand it to theirs when they begin and give it
back when they end. (Sampling shows too little: a second thread gets the interpreter where the first one lets it go.)
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end import cases
from benchmarks.end_to_end.child import one_step
from benchmarks.end_to_end.side_ours import Ours
from deepoffload.accumulation import turns
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.io.ticket import Ticket
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.optim import gradients
from deepoffload.optim.update import HostUpdate
from deepoffload.params.pager import Pager
from deepoffload.params.saved import SavedTensorHooks
from deepoffload.params.window import RootWatch, Window

TORCH = "torch and the model"
OVERHEAD = ("planner", "hooks", "faults")
"""What the target of two per cent is about."""
PARKED: tuple[Any, tuple[str, ...]] = (turns, ("_park",))
"""While a micro-batch is parked others run."""

PARTS: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
    "planner": [(Pager, ("_event", "pump"))],
    "hooks": [
        (Window, ("enter", "leave")),
        (RootWatch, ("enter",)),
        (SavedTensorHooks, ("pack", "unpack")),
        (gradients, ("_landed",)),
    ],
    "faults": [(TierManager, ("acquire", "release", "evict", "prefetch", "poll", "write_behind", "will_change"))],
    "gradients, Python": [(gradients.Gradients, ("land", "used"))],
    "update, kernels and Python": [(HostUpdate, ("apply", "_run_piece"))],
    "landing, kernels": [(cpu_adam, ("land",))],
    "waiting for the disk": [(Ticket, ("wait",))],
}


class Stopwatch:
    """Time by part; every moment belongs to the part that was entered last."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._part = TORCH
        self._since = time.perf_counter()

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self._since = time.perf_counter()

    def enter(self, part: str) -> str:
        """The time from now on is ``part``'s. Returns whose it was."""
        now, before = time.perf_counter(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(part)
            self.calls[part] += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.enter(before)

        return timed


def profile(watch: Stopwatch, case: cases.Case, work: cases.Work, path: str) -> dict[str, Any]:
    """Time ``work.steps`` steps after the warm-up."""
    settings = asdict(work)
    side = Ours(SHAPES[work.size], settings, case.settings, path)
    for number in range(work.warmup):
        one_step(side, settings, number)
    watch.clear()
    begin_s = time.perf_counter()
    for number in range(work.steps):
        one_step(side, settings, work.warmup + number)
    watch.enter(TORCH)
    seconds = time.perf_counter() - begin_s
    shares = {part: watch.seconds[part] / seconds for part in [*PARTS, TORCH]}
    calls = {part: watch.calls[part] / work.steps for part in PARTS}
    side.close()
    return {
        "case": case.name,
        "seconds_per_step": seconds / work.steps,
        "shares": shares,
        "calls_per_step": calls,
        "planner_hooks_faults": sum(shares[part] for part in OVERHEAD),
    }


def print_profile(found: dict[str, Any]) -> None:
    print(f"\n{found['case']}: {found['seconds_per_step']:.3f} s per step")
    for part, share in found["shares"].items():
        milliseconds = share * found["seconds_per_step"] * 1e3
        print(f"  {share:7.2%} {milliseconds:8.1f} ms {found['calls_per_step'].get(part, 0):6.0f} calls  {part}")
    print(f"  {found['planner_hooks_faults']:7.2%}  planner, hooks and faults together")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--case", nargs="+", default=["host", "half", "optimizer", "all"], help="our placements")
    parser.add_argument("--overlap", choices=cases.OVERLAPS, default="deferred", help="our step_overlap")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--order", choices=cases.ORDERS, default="horizontal", help="of the micro-batches")
    parser.add_argument("--clip", type=float, default=1.0, help="global norm")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the profiles to this file")
    said = parser.parse_args()
    torch.set_num_threads(said.threads)
    work = cases.Work(
        said.size,
        accumulate=said.accumulate,
        clip=said.clip,
        warmup=said.warmup,
        steps=said.steps,
        threads=said.threads,
    )
    watch = Stopwatch()
    for part, places in (*PARTS.items(), (TORCH, [PARKED])):
        for owner, names in places:
            for name in names:
                setattr(owner, name, watch.around(part, getattr(owner, name)))
    known = {case.name: case for case in cases.ours(work, said.overlap)}
    profiles = []
    for name in said.case:
        case = known[f"{name}-{said.overlap}"]
        case = cases.vertical(case) if said.order == "vertical" else case
        profiles.append(profile(watch, case, work, said.path))
        print_profile(profiles[-1])
    if said.json:
        machine = {**describe_machine([said.path]), "command": " ".join(sys.argv)}
        said.json.write_text(json.dumps({"machine": machine, "profiles": profiles}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
