"""Rounds between real processes on gloo: all programs end, with the same sums; what goes wrong is an error on all."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepoffload.ranks.service import SLICE_S
from deepoffload.ranks.wait_times import NUDGE_AFTER_S
from tests.ranks import rounds_programs
from tests.support.programs import Programs
from tests.support.rank_processes import LONG_S, SOON_S, launcher_environment, run_ranks, values_of


def run(program: Callable[..., Any], world_size: int, tmp_path: Path, *arguments: Any) -> list[dict[str, Any]]:
    """What the ranks return, when they agree about what was launched, and their threads have ended."""
    results = values_of(program, world_size, str(tmp_path / "store"), *arguments)
    assert all(result["launched"] == results[0]["launched"] for result in results)
    assert all(result["sums"] == results[0]["sums"] for result in results)
    assert all(result["threads"] == [] for result in results)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_programs_make_one_round_for_each_want(world_size: int, tmp_path: Path) -> None:
    steps = 3
    results = run(rounds_programs.equal_steps, world_size, tmp_path, steps)
    assert all(result["steps"] == steps for result in results)
    if all(result["stats"].answers == 0 for result in results):  # no thread had to answer for a program that was slow
        for result in results:
            assert result["stats"].mixed_rounds == 0
            assert result["stats"].rounds == steps * (3 * rounds_programs.UNITS + 1) + 1


def test_what_comes_between_two_looks_is_taken_at_once(tmp_path: Path) -> None:
    """Others may wait until it is. A wait for their round would take a second."""
    waited_s, _ = values_of(rounds_programs.come_between_looks, 2, str(tmp_path / "store"))
    assert waited_s < SLICE_S / 2


def test_a_slow_rank_is_named_by_who_waits_for_it(tmp_path: Path) -> None:
    quick, _ = run(rounds_programs.slow_rank, 2, tmp_path, 1, (0.0, 0.2))
    stats = quick["stats"]
    assert 0.1 < stats.waited_for_s[1] <= stats.waited_s  # the other has slept for 1.6 s
    assert stats.waited_for_s[0] == 0.0


def test_a_program_that_is_only_slow_is_not_nudged_again_and_again(tmp_path: Path) -> None:
    pause_s, waits = 0.15, 16  # each longer than before a first nudge
    quick, _ = run(rounds_programs.slow_rank, 2, tmp_path, 2, (0.0, pause_s))
    longer_s = max(0.0, quick["stats"].waited_s - waits * pause_s)  # where the machine has other things to do
    # One for each wait, if nothing is learned from them. It takes more of them to learn where pauses are uneven.
    assert quick["stats"].nudges < waits * 3 / 4 + longer_s / NUDGE_AFTER_S


@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_that_differ_end_with_the_same_sums(world_size: int, tmp_path: Path) -> None:
    results = run(rounds_programs.unequal_everything, world_size, tmp_path)
    assert {result["steps"] for result in results} == {3 + 2 * (world_size - 1)}
    assert sum(result["stats"].nudges for result in results) > 0
    assert results[0]["stats"].mixed_rounds > 0


def test_who_has_nothing_left_to_do_serves_the_others(tmp_path: Path) -> None:
    results = run(rounds_programs.evaluate_last, 2, tmp_path)
    assert len(results[0]["launched"]) == 4 * rounds_programs.UNITS


@pytest.mark.parametrize("transport", ["group", "memory"])
def test_rounds_lead_to_transfers_of_either_transport(transport: str) -> None:
    results = values_of(rounds_programs.over_a_transport, 2, transport)
    assert all(gathered and added for gathered, added, _ in results)
    assert results[0][2] > 0  # rank 1 was in its barrier


def in_trouble(what: str, world_size: int, tmp_path: Path, timeout_s: float) -> list[dict[str, Any]]:
    """What the ranks return that are left. They all raise one error, and raise it again."""
    ended = run_ranks(rounds_programs.trouble, world_size, str(tmp_path / "store"), what, timeout_s)
    if what == "SIGKILL":
        assert ended.pop(1).exit_code == -9
    assert all(one.error is None and one.exit_code == 0 for one in ended), "\n".join(one.text for one in ended)
    values = [one.value for one in ended]
    for value in values:
        assert (value["threads"], value["fell"]) == ([], [])
    own = values.pop(1) if what == "launch" else None
    assert all(value["class"] == "RankError" for value in values)
    assert {value["error"] for value in values} == {values[0]["error"]} == {value["again"] for value in values}
    if own is not None:
        assert (own["class"], own["again"]) == ("OSError", values[0]["error"])
    return values


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_is_killed_is_named_by_all_others(world_size: int, tmp_path: Path) -> None:
    for value in in_trouble("SIGKILL", world_size, tmp_path, LONG_S):
        assert value["seconds"] < SOON_S
        assert re.search(r"rank 1 has gone; .*rank \d was at gather of layer 'blocks\.\d' \(step 1\)", value["error"])


def test_a_rank_that_does_not_answer_is_named_after_the_limit(tmp_path: Path) -> None:
    value, _ = in_trouble("SIGSTOP", 2, tmp_path, 4.0)
    assert 4.0 <= value["seconds"] < SOON_S
    assert value["error"].startswith("rank 1 does not answer: stopped")
    assert re.search(r"rank 0 has waited 4 s at gather of layer 'blocks\.\d' and nothing has happened", value["error"])


def test_a_program_that_stays_away_is_named_with_its_last_want(tmp_path: Path) -> None:
    value = in_trouble("busy", 2, tmp_path, 4.0)[0]
    assert 4.0 <= value["seconds"] < SOON_S
    assert "nothing has happened" in value["error"]
    assert re.search(
        r"rank 1's program (was outside of the model|did not wait for .* was last at [a-z0-9. ']+) \(step 1\)",
        value["error"],
    )


def test_what_one_rank_raises_all_raise(tmp_path: Path) -> None:
    for value in in_trouble("raise", 2, tmp_path, LONG_S):
        assert value["seconds"] < SOON_S
        assert re.search(r"^rank 1 has failed at [a-z0-9. ']+: ValueError: the batch is empty$", value["error"])


@pytest.mark.parametrize("what", ["launch", "launch for a program that is elsewhere"])
def test_a_payload_that_cannot_start_on_one_rank_is_an_error_on_all(what: str, tmp_path: Path) -> None:
    for value in in_trouble(what, 2, tmp_path, LONG_S):
        assert value["seconds"] < SOON_S
        assert re.match(r"rank 1 has failed at gather of layer 'blocks\.\d': OSError: .*No space left", value["error"])


def test_who_closes_while_others_train_is_an_error_on_all(tmp_path: Path) -> None:
    for value in in_trouble("close", 2, tmp_path, LONG_S):
        assert value["seconds"] < SOON_S
        assert value["error"].startswith(
            "rank 1 has closed its engine after 1 step, but others train on: rank 0 is at its step number 2 (at "
        )


PROGRAM = """
import json
import os
import sys

from tests.ranks.rounds_programs import Side, interrupt_a_wait, wait_elsewhere

ranks = json.loads(sys.argv[1])
children = []
while len(children) < len(ranks):
    rank = ranks[len(children)]
    child = os.fork()
    if not child:
        os.environ.update(rank["environment"])
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(rank[name], os.O_CREAT | os.O_WRONLY), number)
        side = Side(rank["store"])
        side.forward_and_backward()
        side.step()
        print("made", side.steps)
        exec(rank["last"])
        break
    children.append(child)
else:
    ended = [os.wait() for _ in children]
    print(json.dumps([[children.index(child), os.waitstatus_to_exitcode(status)] for child, status in ended]))
"""
"""Forks a process for each rank, which ends as an interpreter ends. Prints in which order they do."""


def run_to_the_end(programs: Programs, tmp_path: Path, last: tuple[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Two interpreters that torchrun has started, and that end without closing anything; ``last`` is the last line of
    each. Who ends because of the other one ends after it."""
    ranks = [
        {
            "environment": launcher_environment(rank, 2, 1) | {"TORCHELASTIC_RUN_ID": "one"},
            "store": str(tmp_path / "store"),
            "output": str(tmp_path / f"output {rank}"),
            "errors": str(tmp_path / f"errors {rank}"),
            "last": line,
        }
        for rank, line in enumerate(last)
    ]
    done = programs.run(PROGRAM, json.dumps(ranks))
    assert done.returncode == 0, done.stderr
    texts = [(Path(rank["output"]).read_text(), Path(rank["errors"]).read_text()) for rank in ranks]
    order = json.loads(done.stdout)
    codes = dict(order)
    assert order[0][0] == 1 or not any(codes.values()), (order, texts)
    return [subprocess.CompletedProcess(PROGRAM, codes[rank], *both) for rank, both in enumerate(texts)]


def test_programs_that_close_nothing_end_quietly(programs: Programs, tmp_path: Path) -> None:
    for ended in run_to_the_end(programs, tmp_path, ("side.evaluate()", "")):
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "made 1\n", "")


@pytest.mark.parametrize(
    ("last", "goes_on", "exit_code", "error"),
    [
        (
            "raise ValueError('no such file')",
            "while True: side.evaluate()",
            1,
            "has failed at step: its program ended with ValueError: no such file",
        ),
        (
            "interrupt_a_wait(side); side.step()",
            "while True: side.evaluate()",
            -2,
            "has failed at step: its program ended with KeyboardInterrupt\n",
        ),
        (
            "sys.exit(3)",
            "while True: side.forward_and_backward()",
            3,
            "'s program has ended after 1 step, but others train on: rank 0 is at its step number 2 (",
        ),
        ("sys.exit(3)", "wait_elsewhere(side)", 3, "was at the end of its program (step 1)\n"),
    ],
    ids=["raises", "ctrl-c", "exits", "exits before a save of another"],
)
def test_a_program_that_ends_with_an_error_tells_the_others(
    programs: Programs, tmp_path: Path, last: str, goes_on: str, exit_code: int, error: str
) -> None:
    left, ended = run_to_the_end(programs, tmp_path, (goes_on, last))
    assert (left.returncode, ended.returncode) == (1, exit_code)
    assert "terminate called" not in left.stderr + ended.stderr
    assert left.stderr.count(f"rank 1{error if error[0] == chr(39) else ' ' + error}") == 1, left.stderr
