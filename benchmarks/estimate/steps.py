"""Predicted against measured step time, for the rows of benchmarks/end_to_end.

    python -m benchmarks.estimate.steps --path /mnt/nvme --json benchmarks/results/estimate_steps_319m.json

Each row is trained in a process of its own. There, rounds alternate: measure the machine (disk, update, operators,
fixed costs), make a few steps, measure again. A round's prediction is made with the means of what was measured before
and after its steps. The first step after a measurement is left out: the disk had time to finish.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpt import GPT, SHAPES, VOCABULARY, tokens_of
from benchmarks.end_to_end.cases import Work, ours
from benchmarks.end_to_end.side_ours import Ours
from deepoffload.config import Precision, parse_config
from deepoffload.estimate import Batch, Estimate, MachineSpec, Subject, estimate, from_module
from deepoffload.estimate.measure import measure_machine, measure_ops, measure_rates
from deepoffload.estimate.recording import DryRun, Op

ROOT = Path(__file__).resolve().parents[2]
SETTLE_S = 0.5


@dataclass(frozen=True)
class Moment:
    """The machine and the operators at one time."""

    machine: MachineSpec
    ops: dict[Op, float]


def between(before: Moment, after: Moment) -> Moment:
    """Means: of seconds, and of rates by the time that a byte takes."""
    changes: dict[str, Any] = {}
    for field in fields(MachineSpec):
        a, b = getattr(before.machine, field.name), getattr(after.machine, field.name)
        if field.name.endswith("_per_s"):
            changes[field.name] = 2 / (1 / a + 1 / b)
        elif field.name.endswith(("_overhead_s", "_while_computing")):
            changes[field.name] = (a + b) / 2
    ops = {op: (seconds + after.ops[op]) / 2 for op, seconds in before.ops.items() if op in after.ops}
    return Moment(replace(before.machine, **changes), ops)


def subject_of(work: Work) -> Subject:
    with torch.device("meta"):
        model = GPT(SHAPES[work.size], work.seq)
    tokens = torch.zeros(work.batch, work.seq).long()
    return from_module(model, Batch(work.batch, work.seq), lambda call: call(tokens, tokens))


def moment(machine: MachineSpec, run: DryRun, path: str) -> Moment:
    time.sleep(SETTLE_S)  # what the disk still writes of the last step
    return Moment(measure_rates(machine, path), measure_ops(run))


def one_row(spec: dict[str, Any]) -> dict[str, Any]:
    """In the row's own process."""
    options, path = spec["options"], spec["path"]
    torch.set_num_threads(options["threads"])
    work = Work(options["size"], options["batch"], options["seq"], options["accumulate"], clip=options["clip"])
    case = next(case for case in ours(work, spec["overlap"]) if case.name == spec["case"])
    said = {key: value for key, value in case.settings.items() if key != "disk"}
    config = parse_config(said, precision=Precision.BF16, nvme_path=[path], gradient_accumulation_steps=work.accumulate)
    subject, machine = subject_of(work), measure_machine(path)
    planned = estimate(subject, machine, config)
    if planned.run is None:
        raise SystemExit(planned.problem)
    side = Ours(SHAPES[work.size], asdict(work), case.settings, path)
    number, rounds = 0, []
    for _ in range(options["warmup"]):
        train(side, work, number)
        number += 1
    before = moment(machine, planned.run, path)
    for _ in range(options["rounds"]):
        train(side, work, number)
        steps = []
        for _ in range(options["steps"]):
            number += 1
            steps.append(train(side, work, number))
        after = moment(machine, planned.run, path)
        rounds.append((steps, between(before, after)))
        before = after
    table = side.engine.placement.table()
    side.close()
    found = [
        (steps, now, estimate(subject, now.machine, config, time_ops=lambda run, ops=now.ops: ops))
        for steps, now in rounds
    ]
    return {"placement": table, "rounds": [as_json(*each) for each in found]}


def train(side: Ours, work: Work, number: int) -> dict[str, float]:
    before, started = side.stats(), time.perf_counter()
    for micro in range(work.accumulate):
        loss = side.loss(*tokens_of(number * work.accumulate + micro, work.batch, work.seq))
        side.backward(loss, work.accumulate)
        side.update(micro == work.accumulate - 1)
    now = side.stats()
    names = ("disk_bytes_read", "disk_bytes_written", "wait_s", "faults")
    return {"seconds": time.perf_counter() - started} | {name: now[name] - before[name] for name in names}


def as_json(steps: list[dict[str, float]], now: Moment, found: Estimate) -> dict[str, Any]:
    if found.step is None:
        raise SystemExit(found.problem)
    return {
        "steps": steps,
        "median_s": statistics.median(step["seconds"] for step in steps),
        "predicted_s": found.step.seconds,
        "predicted": asdict(found.step.times) | {"compute_s": found.step.compute_s, "bound": found.step.bound},
        "machine": now.machine.to_json(),
    }


def row(options: argparse.Namespace, case: str, overlap: str) -> dict[str, Any]:
    spec = {"options": vars(options) | {"json": None}, "path": options.path, "case": case, "overlap": overlap}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.estimate.steps", "--row", json.dumps(spec)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(f"{case} failed")
    found = json.loads(done.stdout.splitlines()[-1])
    rounds = found["rounds"]
    ratios = [each["predicted_s"] / each["median_s"] for each in rounds]
    measured = statistics.median(step["seconds"] for each in rounds for step in each["steps"])
    predicted = statistics.median(each["predicted_s"] for each in rounds)
    read, written = (
        statistics.mean(step[name] for each in rounds for step in each["steps"])
        for name in ("disk_bytes_read", "disk_bytes_written")
    )
    head = {
        "case": case,
        "measured_s": measured,
        "predicted_s": predicted,
        "deviation": predicted / measured - 1,
        "deviation_by_round": [ratio - 1 for ratio in ratios],
        "read_bytes": round(read),
        "predicted_read_bytes": rounds[-1]["predicted"]["read_bytes"],
        "written_bytes": round(written),
        "predicted_written_bytes": rounds[-1]["predicted"]["written_bytes"],
        "bound": rounds[-1]["predicted"]["bound"],
        "load": os.getloadavg()[0],
    }
    return head | found


def show(found: dict[str, Any]) -> str:
    by_round = " ".join(f"{deviation:+.0%}" for deviation in found["deviation_by_round"])
    return (
        f"{found['case']:>20}  step {found['measured_s']:6.2f} s, predicted {found['predicted_s']:6.2f} "
        f"({found['deviation']:+.0%}; by round {by_round});  read {found['read_bytes'] / 1e6:6.0f} MB "
        f"({found['predicted_read_bytes'] / 1e6:6.0f}), written {found['written_bytes'] / 1e6:6.0f} "
        f"({found['predicted_written_bytes'] / 1e6:6.0f});  {found['bound']};  load {found['load']:.1f}"
    )


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """With the options that this program has in common with ``benchmarks.estimate.ranks``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="directory on the disk")
    parser.add_argument("--size", default="319m", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--json", help="file to write")
    return parser


def write_report(options: argparse.Namespace, question: str, rows: list[dict[str, Any]]) -> None:
    """To the file that ``options.json`` names, if it names one."""
    if not options.json:
        return
    machine = {"cores": os.cpu_count(), "processor": platform.processor(), "torch": torch.__version__}
    found = {
        "question": question,
        "machine": machine | {"time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        "options": {key: value for key, value in vars(options).items() if key not in ("json", "row", "rank")},
        "vocabulary": VOCABULARY,
        "rows": rows,
    }
    Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", default=["host", "half", "optimizer", "all"])
    parser.add_argument("--overlaps", nargs="+", default=["deferred"], choices=("deferred", "none", "in_backward"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    options.clip = 1.0
    if options.row:
        print(json.dumps(one_row(json.loads(options.row))))
        return
    if not options.path:
        parser.error("--path is needed")
    rows = []
    for overlap in options.overlaps:
        options.clip = None if overlap == "in_backward" else 1.0  # the norm is not known while gradients still come
        for case in options.cases:
            rows.append(row(options, f"{case}-{overlap}", overlap))
            print(show(rows[-1]), flush=True)
    write_report(options, "predicted against measured step time for the rows of benchmarks/end_to_end", rows)


if __name__ == "__main__":
    main()
