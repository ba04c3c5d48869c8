"""A call that all ranks have to make, and some do not: an error on all that says where each is, as soon as it is
known. Who only comes late is waited for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import missed_programs as programs
from tests.support.rank_processes import SOON_S, run_ranks, values_of, values_of_each

CASES = {
    "a save, and another step": ({0: programs.save}, programs.step, "TrainingState.save", "step"),
    "numbers on the second rank": ({1: programs.look_at_stats}, programs.step, "stats(all_ranks=True)", "step"),
    "a save, and the end": ({0: programs.save}, programs.close, "TrainingState.save", "close"),
    "a load, and an edit": ({1: programs.load}, programs.edit, "loading optimizer state", "edit of "),
    "a save, and no batches left": ({0: programs.save}, programs.join, "TrainingState.save", "join"),
    "what rank 0 does not do": ({1: programs.save_pretrained}, programs.step, "save_pretrained", "step"),
    "a save, and gradients": ({0: programs.save}, programs.look_at_gradient, "TrainingState.save", "waiting for grad"),
    "a save, and another wait": ({0: programs.save}, programs.meet, "TrainingState.save", "setting state"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_others_never_make_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    calls, others, first, second = CASES[name]
    world_size = 3 if "save" in name and "step" in name else 2
    ended = run_ranks(programs.apart, world_size, calls, others, str(tmp_path / "saved"))
    texts = {one.value[0] for one in ended}
    assert len(texts) == 1, texts
    (text,) = texts
    assert text.startswith("RankError: "), text
    for rank in range(world_size):
        place = first if rank in calls else second
        assert re.search(rf"rank {rank} was (at )?{re.escape(place)}", text), text
    assert "Let all ranks make the same calls in the same order" in text and "elsewhere" not in text
    assert all(one.value[1] < SOON_S for one in ended)


TWO_MODELS = {
    "steps": ([programs.step, programs.step], r"at step of TinyGPT \(model 1\)", r"at step of TinyGPT \(model 2\)"),
    "saves, and gradients": (
        [programs.save, programs.look_at_gradient, programs.save],
        r"at TrainingState.save of TinyGPT \(model 1\)",
        r"waiting for gradients of other ranks for layer '[A-Za-z0-9.]+' of TinyGPT \(model 2\)",
    ),
}


@pytest.mark.parametrize("name", TWO_MODELS)
def test_ranks_that_wait_for_each_other_in_calls_of_two_models(name: str, tmp_path: Path) -> None:
    calls, first, second = TWO_MODELS[name]
    for ended in run_ranks(programs.in_two_models, len(calls), calls, str(tmp_path / "saved")):
        text, seconds = ended.value
        firsts = "ranks 0 and 2 are" if len(calls) > 2 else "rank 0 is"
        found = f"RankError: {firsts} {first} and rank 1 is {second}: they wait for each other, so none goes on"
        assert re.match(found, text) and text.endswith("all models, in the same order"), text
        assert seconds < SOON_S


def test_a_program_that_ends_before_a_save_of_another_rank(tmp_path: Path) -> None:
    first, second = run_ranks(programs.end_instead, 2, str(tmp_path / "saved"))
    assert first.error == "RankError", first.text
    assert "rank 0 was at TrainingState.save (step 1), rank 1 was at the end of its " in first.text
    assert first.seconds < SOON_S


def test_a_rank_that_ends_while_a_save_is_under_way(tmp_path: Path) -> None:
    """The others hear of it at once, and not when the save is on the disk."""
    calls = [(str(tmp_path / str(fails)), fails) for fails in (True, False)]
    failed, closed = values_of_each(programs.leave_while_saving, 2, calls)
    assert failed[0][1] == closed[0][1] == [True], (failed, closed)
    assert "rank 1 has failed" in failed[0][0] and "no such sample" in failed[0][0], failed
    assert all("rank 1 has closed its engine after 1 step, but others train on" in said for said, _ in closed), closed
    assert not list(tmp_path.glob("*/*"))  # neither has published anything


def test_who_comes_late_is_waited_for(tmp_path: Path) -> None:
    """A wait that takes long is a line in the log."""
    first, second, third = values_of(programs.late, 3, str(tmp_path / "saved"), 4.0)
    for place in ("TrainingState.save", "stats(all_ranks=True)", "loading optimizer state"):
        assert any(line.startswith(f"ranks 0 and 1 wait at {place} for rank 2, for ") for line in first), (place, first)
    where = "ranks 1 and 2 are at step of TinyGPT (model 2)"
    assert any(f"rank 0 waits at step of TinyGPT (model 1), {where}, for" in line for line in first), first
    (line,) = second  # of those that wait at the same the lowest one says it
    where = "ranks 1 and 2 wait at step of TinyGPT (model 2), rank 0 is at step of TinyGPT (model 1), for"
    assert where in line and not third, (second, third)
    assert all("only a notice" in line for line in first + second)


def test_a_thread_that_waits_is_no_program_that_waits() -> None:
    assert values_of(programs.look_in_a_thread, 2, 4.0) == [2, 2]


def test_rank_0_saves_alone_and_then_with_the_others(tmp_path: Path) -> None:
    assert values_of(programs.save_alone_and_together, 2, str(tmp_path)) == [True, True]
