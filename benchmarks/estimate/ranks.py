"""Predicted against measured step time and peak memory of several ranks, for rows of benchmarks/ranks.

    python -m benchmarks.estimate.ranks --path /mnt/nvme --json benchmarks/results/estimate_ranks_319m.json

The ranks of a row alternate between measuring and a few steps, all at the same time: processor, operators and link are
measured while the neighbours measure, too. A prediction uses the means of what was measured before and after its steps.
The first step after a measurement is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.gpt import SHAPES
from benchmarks.common.launch import start_ranks
from benchmarks.end_to_end.cases import Work
from benchmarks.end_to_end.meter import MemoryWatch, memory_bytes
from benchmarks.end_to_end.side_ours import Ours
from benchmarks.estimate.steps import SETTLE_S, Moment, between, parser_of, subject_of, train, write_report
from benchmarks.ranks.training import cases
from deepoffload.config import Precision, parse_config
from deepoffload.estimate import MachineSpec, estimate
from deepoffload.estimate.measure import unmeasured_machine
from deepoffload.estimate.on_ranks import MeasuringRanks
from deepoffload.estimate.progress import silent
from deepoffload.estimate.recording import DryRun

ROWS = ("ours memory", "ours gloo", "ours nvme", "ours nvme guessing")
NEVER_CLIPS = 100.0
"""The largest norm of gradients: the first steps of this model would exceed 1, and guesses would be wrong."""
LIMIT_S = 1800.0


def moment(ranks: MeasuringRanks, machine: MachineSpec, run: DryRun, path: str) -> Moment:
    time.sleep(SETTLE_S)  # what the disk still writes of the last step
    return Moment(ranks.machine(machine, path, silent), dict(ranks.ops(run, progress=silent)))


def one_rank(spec: dict[str, Any]) -> dict[str, Any]:
    """In a rank's own process."""
    options, path = spec["options"], spec["path"]
    torch.set_num_threads(1)
    work = Work(options["size"], options["batch"], options["seq"], options["accumulate"], clip=NEVER_CLIPS)
    settings = {"timeline": False, "step_overlap": "deferred"} | cases(options["host_budget"])[spec["row"]].settings
    said = {key: value for key, value in settings.items() if key != "disk"}
    if settings["disk"]:
        said["nvme_path"] = [path]
    config = parse_config(said, precision=Precision.BF16, gradient_accumulation_steps=work.accumulate)
    ranks, disk = MeasuringRanks(config.ranks.transport), path if settings["disk"] else None
    machine = ranks.machine(unmeasured_machine(disk), path, silent)
    subject = subject_of(work)
    planned = estimate(subject, machine, config)
    if planned.run is None or not planned.fits:
        raise SystemExit(planned.problem)
    process_bytes = memory_bytes(os.getpid())
    with MemoryWatch(os.getpid()) as watch:
        side = Ours(SHAPES[work.size], asdict(work), settings, path)
        for number in range(options["warmup"]):
            train(side, work, number)
        peak_bytes = watch.take_peak()
    before, rounds, number = moment(ranks, machine, planned.run, path), [], options["warmup"]
    for _ in range(options["rounds"]):
        steps = []
        for _ in range(options["steps"] + 1):
            dist.barrier()
            steps.append(train(side, work, number))
            number += 1
        after = moment(ranks, machine, planned.run, path)
        rounds.append((steps[1:], between(before, after)))
        before = after
    side.close()
    found = []
    for steps, now in rounds:
        told = estimate(subject, now.machine, config, time_ops=lambda run, ops=now.ops: ops)
        if told.step is None or told.memory is None:
            raise SystemExit(told.problem)
        found.append(
            {
                "steps": steps,
                "predicted_s": told.step.seconds,
                "predicted": asdict(told.step.times) | {"compute_s": told.step.compute_s, "bound": told.step.bound},
                "predicted_peak_bytes": told.memory.host_bytes - now.machine.process_bytes + process_bytes,
                "machine": now.machine.to_json(),
            }
        )
    ranks.close()
    return {"rounds": found, "peak_bytes": peak_bytes}


def row(options: argparse.Namespace, name: str) -> dict[str, Any]:
    spec = {"options": vars(options) | {"json": None}, "path": options.path, "row": name}
    command = [sys.executable, "-m", "benchmarks.estimate.ranks", "--rank", json.dumps(spec)]
    processes = start_ranks(command, options.ranks, threads=1)
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name} failed")
    all_ranks = [json.loads(text.splitlines()[-1]) for text in printed]
    rounds = all_ranks[0]["rounds"]
    measured = statistics.median(step["seconds"] for each in rounds for step in each["steps"])
    predicted = statistics.median(each["predicted_s"] for each in rounds)
    peak, predicted_peak = max(one["peak_bytes"] for one in all_ranks), rounds[0]["predicted_peak_bytes"]
    return {
        "row": name,
        "measured_s": measured,
        "predicted_s": predicted,
        "deviation": predicted / measured - 1,
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted_peak,
        "peak_deviation": predicted_peak / peak - 1,
        "read_bytes": statistics.mean(step["disk_bytes_read"] for each in rounds for step in each["steps"]),
        "predicted_read_bytes": rounds[-1]["predicted"]["read_bytes"],
        "bound": rounds[-1]["predicted"]["bound"],
        "load": os.getloadavg()[0],
        "rounds": rounds,
    }


def show(found: dict[str, Any]) -> str:
    return (
        f"{found['row']:>12}  step {found['measured_s']:6.2f} s, predicted {found['predicted_s']:6.2f} "
        f"({found['deviation']:+.0%});  peak of a rank {found['peak_bytes'] / 1e6:6.0f} MB, predicted "
        f"{found['predicted_peak_bytes'] / 1e6:6.0f} ({found['peak_deviation']:+.1%});  read "
        f"{found['read_bytes'] / 1e6:6.0f} MB ({found['predicted_read_bytes'] / 1e6:6.0f});  {found['bound']};  load "
        f"{found['load']:.1f}"
    )


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--host-budget", default="1GiB", help="of the row on NVMe")
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(one_rank(json.loads(options.rank))))
        return
    if not options.path:
        parser.error("--path is needed")
    rows = []
    for name in options.rows:
        rows.append(row(options, name))
        print(show(rows[-1]), flush=True)
    write_report(options, "predicted against measured: time of a step and peak memory, on several ranks", rows)


if __name__ == "__main__":
    main()
