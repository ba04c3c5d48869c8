"""Runs many random programs and makes those that go wrong small.

``python -m tests.fuzz.campaign --programs 5000 --first 100000 --directory DIR`` runs more than the test suite does;
each program has a number, and ``--first N --programs 1`` runs it again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepoffload.errors import BudgetError
from tests.fuzz.program import Program, generate, run_paged, run_twin, speculative
from tests.fuzz.verdict import Verdict, judge
from tests.support.paging import Paging


def check(paging: Paging, program: Program) -> Verdict:
    """Run a program on both sides and compare."""
    expected = run_twin(paging, program)
    try:
        return judge(program, expected, run_paged(paging, program))
    except BudgetError as error:  # in construction: before anything has run
        return Verdict("refused", f"before training: {error}")
    except Exception:
        return Verdict("wrong", traceback.format_exc(limit=-6))


def smaller(program: Program) -> Iterator[Program]:
    """The same program with one thing less."""
    operations = program.operations
    for index in range(len(operations)):
        yield replace(program, operations=operations[:index] + operations[index + 1 :])
    if len(program.order) > len(program.kinds):
        yield replace(program, order=tuple(range(len(program.kinds))))
    for index, how in enumerate(program.checkpoints):
        if how is not None:
            plain = (*program.checkpoints[:index], None, *program.checkpoints[index + 1 :])
            yield replace(program, checkpoints=plain)
    for index in range(len(program.kinds)):
        if len(program.kinds) > 1:
            order = tuple(number - (number > index) for number in program.order if number != index)
            yield replace(
                program,
                kinds=program.kinds[:index] + program.kinds[index + 1 :],
                checkpoints=program.checkpoints[:index] + program.checkpoints[index + 1 :],
                order=order,
            )
    if program.tied:
        yield replace(program, tied=False)


def shrink(paging: Paging, program: Program, seconds: float) -> tuple[Program, Verdict]:
    """A program that goes wrong, with as little in it as can be found in that time."""
    end = time.monotonic() + seconds
    verdict = check(paging, program)
    found = True
    while found and time.monotonic() < end:
        found = False
        for candidate in smaller(program):
            other = check(paging, candidate)
            if other.kind == "wrong":
                program, verdict, found = candidate, other, True
                break
            if time.monotonic() > end:
                break
    return program, verdict


def campaign(
    paging: Paging,
    first: int,
    programs: int,
    *,
    shrink_s: float = 20.0,
    seconds: float = float("inf"),
    change: Callable[[Program], Program] = lambda program: program,
) -> tuple[Counter[str], list[str]]:
    """Run programs ``first`` to ``first + programs``, each after ``change``, as many as ``seconds`` allow.

    Returns how many ended how, and a text for each that went wrong.
    """
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    end = time.monotonic() + seconds
    for seed in range(first, first + programs):
        if time.monotonic() > end:
            break
        program = change(generate(seed))
        verdict = check(paging, program)
        ended[verdict.kind] += 1
        if verdict.kind == "wrong":
            least, reason = shrink(paging, program, shrink_s)
            if reason.kind != "wrong":
                least, reason = program, verdict  # not every time
            wrong.append(f"{least}\n    {reason}")
    return ended, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--shrink-s", type=float, default=20.0, help="time to make each wrong program small")
    parser.add_argument("--directory", type=Path, default=Path("."), help="where swap files go: on a real disk")
    parser.add_argument("--speculative", action="store_true", help="all with updates on a guess")
    options = parser.parse_args()
    change: dict[str, Any] = {"change": speculative} if options.speculative else {}
    torch.set_num_threads(1)  # such small tensors are slower with more
    logging.getLogger("deepoffload").setLevel(logging.ERROR)
    gc.freeze()  # engines collect garbage: what has been imported is none
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        paging = Paging(Path(directory))
        for first in range(options.first, options.first + options.programs, 10):
            count = min(10, options.first + options.programs - first)
            ended, wrong = campaign(paging, first, count, shrink_s=options.shrink_s, seconds=options.seconds, **change)
            print(first, dict(ended), flush=True)
            for text in wrong:
                print(text, flush=True)


if __name__ == "__main__":
    main()
