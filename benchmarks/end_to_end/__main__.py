"""One training step: deepoffload, plain PyTorch and DeepSpeed ZeRO-Infinity in turn on the same disk.

    python -m benchmarks.end_to_end --path /mnt/nvme --quick
    python -m benchmarks.end_to_end --path /mnt/nvme --deepspeed-python /opt/dsvenv/bin/python --fio

Every round runs every case once, each in a process of its own, after measuring what the disk gives to the best tool.
A ratio is the median over the rounds of "our median step by theirs in the same round"; steps during which other
programs used more than a tenth of the CPU are made again and do not count. The targets are printed row by
row; the JSON with the machine goes to benchmarks/results/. DeepSpeed's own environment: requirements-deepspeed.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gpt import SHAPES
from benchmarks.end_to_end import cases as all_cases
from benchmarks.end_to_end.cases import ORDERS, OVERLAPS, Case, Side, Work
from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.report import case_lines, rate_lines, report_json, target_lines
from benchmarks.end_to_end.runner import RESULTS, CaseFailedError, end_with_children, python_of, run_case
from benchmarks.end_to_end.targets import Result, Round, evaluate, moved_bytes, order_rows, rows
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.io.swap_files import check_paths


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--size", choices=sorted(SHAPES), default="319m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=["horizontal"], help="of our micro-batches")
    parser.add_argument("--clip", type=float, default=1.0, help="global norm; 0: no clipping")
    parser.add_argument("--overlap", nargs="+", choices=OVERLAPS, default=["none"], help="our step_overlap")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--foreign-max", type=float, default=0.1, help="share of the CPU time that may be others'")
    parser.add_argument("--steps-max", type=int, help="when to give up waiting for quiet steps; not said: 3 x --steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", nargs="+", metavar="CASE", help="only these cases, or those that begin so")
    parser.add_argument("--deepspeed-python", metavar="FILE", help="python of an environment with DeepSpeed")
    parser.add_argument("--verify", action="store_true", help="everything on NVMe also with checksums (aio.verify)")
    parser.add_argument(
        "--wrong-guesses",
        action="store_true",
        help="also runs whose guesses are wrong at times, or always; with --overlap deferred speculative, --clip so "
        "high that nothing else clips, --warmup 12 and --steps 13",
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="also everything in memory while a process of its own moves the bytes of each disk row",
    )
    parser.add_argument("--fio", action="store_true", help="let fio compete for the best disk rate")
    parser.add_argument("--file-mib", type=int, default=512, help="of the two files that the disk's rate is taken with")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="record our runs: Chrome traces there, and summaries")
    parser.add_argument("--quick", action="store_true", help="125 M parameters, one round, no DeepSpeed")
    parser.add_argument("--json", type=Path, help="not said: benchmarks/results/end_to_end_SIZE.json")
    said = parser.parse_args(arguments)
    if said.quick:
        said.size, said.rounds, said.steps, said.deepspeed_python = "125m", 1, 3, None
    if said.file_mib < 128 or said.file_mib % 128:
        parser.error("--file-mib is a multiple of 128")
    if min(said.rounds, said.steps, said.batch, said.seq, said.accumulate, said.threads) < 1 or said.warmup < 0:
        parser.error("--rounds, --steps, --batch, --seq, --accumulate and --threads are at least 1")
    if said.clip and "in_backward" in said.overlap:
        parser.error("in_backward cannot clip by the global norm; add --clip 0")
    return said


def chosen_cases(said: argparse.Namespace, work: Work) -> list[Case]:
    found = [*all_cases.PLAIN]
    for overlap in said.overlap:
        mine = all_cases.ours(work, overlap, verify=said.verify)
        placed = [*mine] if "horizontal" in said.order else []
        placed += map(all_cases.vertical, mine) if "vertical" in said.order else ()
        found += placed
        found += [all_cases.beside(mine[0], case) for case in placed if case.settings["disk"]] if said.beside else ()
    found += all_cases.clipping(work) if said.wrong_guesses else ()
    found += all_cases.deepspeed(work) if said.deepspeed_python else ()
    if said.trace is not None:
        said.trace.mkdir(parents=True, exist_ok=True)
        found = [all_cases.recorded(case, said.trace) for case in found]
    if said.rows:
        found = [case for case in found if case.name.startswith(tuple(said.rows))]
    return found


def measure(
    said: argparse.Namespace, work: Work, cases: list[Case], rounds: list[Round], after_run: Callable[[], None]
) -> None:
    """All rounds, into ``rounds``. A case of another tool that fails is left out from then on; one of ours ends
    the benchmark."""
    left = list(cases)
    with DiskRate(said.path, fio=said.fio, file_bytes=said.file_mib << 20) as disk:
        for number in range(said.rounds):
            this = Round(rates=disk.measure())
            rounds.append(this)
            turn = number % max(1, len(left))
            for chosen in sorted(left[turn:] + left[:turn], key=lambda case: "beside" in case.settings):
                case = _with_bytes(chosen, this)
                if case is None:
                    continue
                started = time.monotonic()
                try:
                    run = run_case(case, work, said.path, python_of(case, said.deepspeed_python))
                except CaseFailedError as error:
                    if case.side is not Side.DEEPSPEED:
                        raise
                    print(f"left out: {error}", file=sys.stderr)
                    left.remove(chosen)
                    continue
                this.runs[case.name] = run
                print(
                    f"round {number + 1}/{said.rounds} {case.name:26} {run.median('seconds'):6.2f} s  "
                    f"{len(run.counted)} of {len(run.steps)} steps  "
                    f"(whole run {time.monotonic() - started:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
                after_run()


def _with_bytes(case: Case, this: Round) -> Case | None:
    """The case, where it moves as many bytes as another one when that has run; None where it has not."""
    other = case.settings.get("beside")
    if other is None:
        return case
    return all_cases.moving(case, moved_bytes(this.runs[other])) if other in this.runs else None


def work_of(said: argparse.Namespace) -> Work:
    return Work(
        size=said.size,
        batch=said.batch,
        seq=said.seq,
        accumulate=said.accumulate,
        clip=said.clip or None,
        warmup=said.warmup,
        steps=said.steps,
        steps_max=max(said.steps, said.steps_max or 3 * said.steps),
        foreign_share_max=said.foreign_max,
        threads=said.threads,
    )


def show(said: argparse.Namespace, work: Work, cases: list[Case], rounds: list[Round], results: list[Result]) -> None:
    shape = f"{work.batch} x {work.seq} tokens, k = {work.accumulate}, clipping {work.clip}, {work.threads} threads"
    print(f"\n{work.num_parameters / 1e6:.1f} M parameters, {shape}, {len(rounds)} rounds of {work.steps} steps\n")
    for lines in (case_lines(cases, rounds), rate_lines(rounds), target_lines(results)):
        print("\n".join(lines), end="\n\n")
    for case in cases if said.trace is not None else ():
        for run in [round.runs[case.name] for round in rounds if case.name in round.runs][-1:]:
            print(f"{case.name}\n{run.notes}", end="\n\n")


def main(arguments: list[str] | None = None) -> int:
    end_with_children()
    said = parse(arguments)
    (directory,) = check_paths([said.path], key="--path")
    work = work_of(said)
    cases = chosen_cases(said, work)
    machine: dict[str, Any] = describe_machine([directory])
    rounds: list[Round] = []
    out = said.json or RESULTS / f"end_to_end_{said.size}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def results() -> list[Result]:
        found = [row for overlap in said.overlap for row in (*rows(work, overlap), *order_rows(work, overlap))]
        return evaluate(found, rounds)

    def write() -> None:
        """After every run, so that what was measured stays when a later one fails."""
        out.write_text(json.dumps(report_json(work, cases, rounds, results(), machine), indent=1) + "\n")

    try:
        measure(said, work, cases, rounds, write)
    except CaseFailedError as error:
        print(f"benchmarks.end_to_end: error: {error}", file=sys.stderr)
        return 1
    show(said, work, cases, rounds, results())
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
