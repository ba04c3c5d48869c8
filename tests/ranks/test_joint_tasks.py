"""What ranks do together outside of rounds, in one process, with a store that is a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from deepoffload.errors import ClosedError, UsageError
from deepoffload.ranks import joint_task
from deepoffload.ranks.joint_task import JointTask, JointTasks
from tests.support.waiting import wait_until


class Store:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values[key]

    def check(self, key: str) -> bool:
        return key in self.values

    def add(self, key: str, amount: int) -> int:
        self.values[key] = self.values.get(key, 0) + amount
        return int(self.values[key])

    def delete_key(self, key: str) -> None:
        del self.values[key]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self.values.setdefault(key, value.encode())  # type: ignore[no-any-return]


class Waiting:
    """Notices of ranks that nobody leaves."""

    @contextmanager
    def kept_together(self) -> Iterator[None]:
        yield

    def wait(self, over: Callable[[], bool], what: str, progress: Callable[[], int], missing: Any = None) -> None:
        wait_until(over)


def ranks_of(store: Store, world_size: int) -> list[JointTasks]:
    return [JointTasks(store, Waiting(), rank, world_size) for rank in range(world_size)]  # type: ignore[arg-type]


def do_together(ranks: list[JointTasks], what: str) -> list[list[int]]:
    def one(tasks: JointTasks) -> list[int]:
        with tasks.begin(what).together() as task:
            return task.gather(task.rank)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_what_was_said_at_a_task_stays_until_all_have_ended_it():
    store = Store()
    ranks = first, second = ranks_of(store, 2)
    tasks = [one.begin("a save") for one in ranks]
    for task in tasks:
        task.goes_on = True
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(tasks[0].gather, "of rank 0")
        wait_until(lambda: bool(store.values))
        for _ in range(3):
            assert do_together(ranks, "another") == [[0, 1], [0, 1]]
        assert tasks[1].gather("of rank 1") == ["of rank 0", "of rank 1"]
        assert gathered.result() == ["of rank 0", "of rank 1"]
    assert first.oldest == second.oldest == 1
    tasks[0].end()
    tasks[1].end()
    do_together(ranks, "another")
    do_together(ranks, "another")
    assert {key.split(".")[0] for key in store.values if " of " in key} == {"task 6"}


def test_what_was_said_at_earlier_tasks_goes():
    store = Store()
    ranks = ranks_of(store, 3)
    for _ in range(4):
        do_together(ranks, "a call")
    assert {key.split(".")[0] for key in store.values if " of " in key} == {"task 4"}


def test_a_rank_that_fails_goes_on_and_the_others_hear_of_it_later():
    store = Store()
    first, second = ranks_of(store, 2)
    for number in range(3):
        with pytest.raises(UsageError, match=f"number {number}"), second.begin("a test").together():
            raise UsageError(f"number {number}")
    for number in range(3):
        with pytest.raises(UsageError, match=f"rank 1 has failed at a test: number {number}"):
            with first.begin("a test").together():
                pass
    assert do_together([first, second], "another") == [[0, 1], [0, 1]]


def test_what_one_rank_gives_up_ends_on_all_unless_it_is_settled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joint_task, "LOOK_S", 0.0)
    ranks = ranks_of(Store(), 3)
    first, second, third = [one.begin("a save") for one in ranks]
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(end_of, second, second.gather)
        works = pool.submit(end_of, third, lambda: wait_until(lambda: third.alive() is not None))
        first.give_up(ClosedError("Ctrl-C"))
        assert str(end_of(first, first.alive)) == "Ctrl-C"
        why = "rank 0 has failed at a save: Ctrl-C"
        assert [(type(one.result()), str(one.result())) for one in (waits, works)] == [(ClosedError, why)] * 2
    assert str(end_of(first, first.settle)) == why
    first, second, third = [one.begin("a save") for one in ranks]
    first.settle()
    second.give_up(ClosedError("Ctrl-C"))
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda task: end_of(task, task.gather), (first, second, third))) == [None] * 3


def end_of(task: JointTask, call: Callable[[], Any]) -> BaseException | None:
    """What the call fails with, as a part of the task."""
    task.goes_on = True
    try:
        with task.together():
            call()
    except ClosedError as error:
        return error
    return None
