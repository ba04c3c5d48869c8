"""Saving and loading of a whole training state, next to what the disk gives and to torch.save and DeepSpeed; what a
save in the background and durable steps cost the steps of a run.

    python -m benchmarks.checkpoint --path /mnt/nvme --quick
    python -m benchmarks.checkpoint --path /mnt/nvme --deepspeed-python /opt/dsvenv/bin/python

Every round runs every row once, each case in a separate process: it trains a step, then saves and loads. Right before
a save or load of ours, the disk's rate is measured as `ds_nvme_bench` measures it: of reads and writes at once, or of
the one that the case needs; for a save, also which share of it a new file gets. A load reads from the disk: what a save
left in the page cache is dropped before it. A ratio is the median over the rounds. Steps during a save in the
background are compared with steps of the same process before and after it, durable steps with those of a process that
takes turns with theirs. DeepSpeed's own environment: benchmarks/end_to_end/requirements-deepspeed.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.new_file import new_file_share
from benchmarks.checkpoint.process import CaseProcess
from benchmarks.checkpoint.report import lines_of, to_reach
from benchmarks.checkpoint.rows import ROWS, Row, chosen_rows
from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.cases import Side, Work
from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.runner import RESULTS, CaseFailedError, end_with_children, python_of
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.io.swap_files import check_paths


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}; not said: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128, help="tokens of the sequence of the one step")
    parser.add_argument("--deepspeed-python", metavar="FILE", help="python of an environment with DeepSpeed")
    parser.add_argument("--file-mib", type=int, default=512, help="of the two files that the disk's rate is taken with")
    parser.add_argument("--quick", action="store_true", help="125 M parameters, one round, no DeepSpeed")
    parser.add_argument("--json", type=Path, help="not said: benchmarks/results/checkpoint_SIZE.json")
    said = parser.parse_args(arguments)
    if said.quick:
        said.size, said.rounds, said.deepspeed_python = "125m", 1, None
    if said.rows and "deepspeed-cpu" in said.rows and not said.deepspeed_python:
        parser.error("the row deepspeed-cpu needs --deepspeed-python, without --quick")
    said.rows = said.rows or [row for row in ROWS if said.deepspeed_python or row != "deepspeed-cpu"]
    if said.file_mib < 128 or said.file_mib % 128:
        parser.error("--file-mib is a multiple of 128")
    if min(said.rounds, said.threads, said.seq) < 1:
        parser.error("--rounds, --threads and --seq are at least 1")
    return said


def run(row: Row, work: Work, disk: DiskRate, said: argparse.Namespace) -> dict[str, Any]:
    """All actions of a row: what each cost, with the rates right before it.

    Raises:
        CaseFailedError: a process ended with an error.
    """
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(CaseProcess(case, work, said.path, python_of(case, said.deepspeed_python)))
            for case in row.cases
        ]
        for action in row.actions:
            rate = None if action.rate is None else max(disk.measure(action.rate).values())
            found[action.label] = {"disk_bytes_per_s": rate}
            if rate is not None and action.what == "save":
                found[action.label]["new_file_share"] = new_file_share(Path(said.path), said.file_mib << 20)
            found[action.label] |= processes[action.case].ask(action.what)
        for process in processes:
            process.end()
    return found


def measure(said: argparse.Namespace, work: Work, rows: list[Row], out: Path, machine: dict[str, Any]) -> None:
    rounds: list[dict[str, Any]] = []
    left = list(rows)
    with DiskRate(said.path, fio=False, file_bytes=said.file_mib << 20) as disk:
        for number in range(said.rounds):
            rounds.append({})
            for row in list(left):
                try:
                    found = run(row, work, disk, said)
                except CaseFailedError as error:
                    if row.cases[0].side is not Side.DEEPSPEED:
                        raise
                    print(f"left out: {error}", file=sys.stderr)
                    left.remove(row)
                    continue
                rounds[-1][row.name] = found
                for action, cost in found.items():
                    print(f"round {number + 1} {row.name}: {action} {cost['seconds']:.2f} s", file=sys.stderr)
                report = {
                    "question": "saving and loading a training state, next to the disk's rates and other ways",
                    "machine": machine,
                    "work": {**asdict(work), "parameters": work.num_parameters},
                    "cases": [
                        {"case": row.name, "text": case.text, "settings": case.settings}
                        for row in rows
                        for case in row.cases
                    ],
                    "rounds": rounds,
                    "to_reach": to_reach(rounds),
                }
                out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines_of(rounds, work.num_parameters)))


def main(arguments: list[str] | None = None) -> int:
    end_with_children()
    said = parse(arguments)
    (directory,) = check_paths([said.path], key="--path")
    work = Work(size=said.size, seq=said.seq, threads=said.threads)
    out = said.json or RESULTS / f"checkpoint_{said.size}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        measure(said, work, chosen_rows(work, said.rows), out, describe_machine([directory]))
    except CaseFailedError as error:
        print(f"benchmarks.checkpoint: error: {error}", file=sys.stderr)
        return 1
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
