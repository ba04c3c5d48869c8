"""Saving and loading of a whole training state, next to what the disk gives and to torch.save and DeepSpeed.

    python -m benchmarks.checkpoint --path /mnt/nvme --quick
    python -m benchmarks.checkpoint --path /mnt/nvme --deepspeed-python /opt/dsvenv/bin/python

Every round runs every case once, in a process of its own: it trains a step, then saves and loads. Right before a save
or load of ours, the disk's rate is measured as `ds_nvme_bench` measures it: of reads and writes at once, or of the one
that the case needs. A load reads from the disk: what a save left in the page cache is dropped before it. A ratio is the
median over the rounds. DeepSpeed's own environment: benchmarks/end_to_end/requirements-deepspeed.txt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.report import lines_of, to_reach
from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end.cases import Case, Side, Work, deepspeed, ours
from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.meter import MemoryWatch
from benchmarks.end_to_end.runner import RESULTS, ROOT, CaseFailedError, end_with_children, environment, python_of
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.cli.nvme.types import Pattern
from deepoffload.io.swap_files import check_paths

ACTIONS: dict[str, dict[str, Pattern | None]] = {
    "all": {"save": Pattern.MIXED, "load": Pattern.MIXED, "torch_save": None, "torch_load": None},
    "host": {"save": Pattern.WRITE, "load": Pattern.READ},
    "deepspeed-cpu": {"save": None, "load": None},
}
"""What is done in each case, and which rate of the disk says how fast it can be."""

ERROR_CHARACTERS = 2000


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128, help="tokens of the sequence of the one step")
    parser.add_argument("--deepspeed-python", metavar="FILE", help="python of an environment with DeepSpeed")
    parser.add_argument("--file-mib", type=int, default=512, help="of the two files that the disk's rate is taken with")
    parser.add_argument("--quick", action="store_true", help="125 M parameters, one round, no DeepSpeed")
    parser.add_argument("--json", type=Path, help="not said: benchmarks/results/checkpoint_SIZE.json")
    said = parser.parse_args(arguments)
    if said.quick:
        said.size, said.rounds, said.deepspeed_python = "125m", 1, None
    if said.file_mib < 128 or said.file_mib % 128:
        parser.error("--file-mib is a multiple of 128")
    if min(said.rounds, said.threads, said.seq) < 1:
        parser.error("--rounds, --threads and --seq are at least 1")
    return said


def chosen_cases(work: Work, *, peers: bool) -> list[Case]:
    found = [*ours(work, "none"), *(deepspeed(work) if peers else ())]
    return [case for case in found if name_of(case) in ACTIONS]


def name_of(case: Case) -> str:
    return case.name.removesuffix("-none")


def run(case: Case, work: Work, disk: DiskRate, path: str, python: str) -> dict[str, Any]:
    """All actions of a case: what each cost, with the rates right before it.

    Raises:
        CaseFailedError: the process ended with an error.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory(dir=path) as folder:
        child = subprocess.Popen(
            [python, "-m", "benchmarks.checkpoint.child", json.dumps(case.spec(work, folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(work.threads),
            cwd=ROOT,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with MemoryWatch(child.pid) as memory:
                answer = child.stdout.readline()
                for action, pattern in ACTIONS[name_of(case)].items() if answer else ():
                    rate = None if pattern is None else max(disk.measure(pattern).values())
                    before = memory.take_peak()
                    print(action, file=child.stdin, flush=True)
                    answer = child.stdout.readline()
                    if not answer:
                        break
                    peak = memory.take_peak()
                    found[action] = {
                        **json.loads(answer),
                        "disk_bytes_per_s": rate,
                        "more_bytes": max(0, peak - before),
                    }
            child.stdin.close()
            if child.wait(60) or not answer:
                errors.seek(0)
                raise CaseFailedError(f"{case.name} failed:\n{errors.read()[-ERROR_CHARACTERS:]}")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
    return found


def measure(said: argparse.Namespace, work: Work, cases: list[Case], out: Path, machine: dict[str, Any]) -> None:
    rounds: list[dict[str, Any]] = []
    left = list(cases)
    with DiskRate(said.path, fio=False, file_bytes=said.file_mib << 20) as disk:
        for number in range(said.rounds):
            rounds.append({})
            for case in list(left):
                try:
                    found = run(case, work, disk, said.path, python_of(case, said.deepspeed_python))
                except CaseFailedError as error:
                    if case.side is not Side.DEEPSPEED:
                        raise
                    print(f"left out: {error}", file=sys.stderr)
                    left.remove(case)
                    continue
                rounds[-1][name_of(case)] = found
                for action, cost in found.items():
                    print(f"round {number + 1} {case.text}: {action} {cost['seconds']:.2f} s", file=sys.stderr)
                report = {
                    "question": "saving and loading a training state, next to the disk's rates and other ways",
                    "machine": machine,
                    "work": {**asdict(work), "parameters": work.num_parameters},
                    "cases": [{"case": name_of(case), "text": case.text, "settings": case.settings} for case in cases],
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
        measure(said, work, chosen_cases(work, peers=bool(said.deepspeed_python)), out, describe_machine([directory]))
    except CaseFailedError as error:
        print(f"benchmarks.checkpoint: error: {error}", file=sys.stderr)
        return 1
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
