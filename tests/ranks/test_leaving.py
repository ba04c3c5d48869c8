"""Other ranks hear that a program has ended while its process waits for a save."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from deepoffload.ranks.leaving import telling_end, telling_end_of_process
from deepoffload.ranks.rounds import EndOf
from tests.support.programs import Programs
from tests.support.rank_processes import launcher_environment


class Rounds:
    """What the others hear."""

    def __init__(self) -> None:
        self.away, self.has_failed, self.end = self, False, EndOf.ENGINE
        self.said: list[str] = []
        self.heard = threading.Event()

    def fail(self, message: str) -> None:
        self.has_failed = True
        self.ends(message)

    def ends(self, message: str = "it ends") -> None:
        self.said.append(message)
        self.heard.set()


@pytest.mark.parametrize("error", [None, KeyError("no such sample")])
def test_others_hear_of_the_end_of_a_process_that_waits(error: BaseException | None, monkeypatch: pytest.MonkeyPatch):
    if error is not None:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    rounds, of_one_that_runs = Rounds(), Rounds()
    with telling_end_of_process(of_one_that_runs), telling_end_of_process(rounds, lambda: True):
        assert rounds.heard.wait(60.0)
    assert rounds.said[0] == ("it ends" if error is None else "its program ended with KeyError: 'no such sample'")
    assert of_one_that_runs.said == []
    assert (rounds.end, of_one_that_runs.end) == (EndOf.PROGRAM, EndOf.ENGINE)


def test_what_ends_at_once_is_not_told():
    rounds = Rounds()
    with telling_end(rounds, None):
        """Nothing takes long."""
    assert rounds.said == []


PROGRAM = """
import json, os, signal, sys, threading, time
from functools import partial
import torch
import deepoffload
from deepoffload.checkpoint import saving
from deepoffload.io.engine import IoEngine
from tests.checkpoint.background import mlp, train
from tests.checkpoint.training import adamw
from tests.support.rank_processes import own_group

folder, environments, interrupted = json.loads(sys.argv[1])
children = []
for rank, environment in enumerate(environments):
    if child := os.fork():
        children.append(child)
        continue
    os.environ.update(environment)
    os.dup2(os.open(f"{folder}/said by {rank}", os.O_CREAT | os.O_WRONLY), 2)
    own_group(f"{folder}/meeting")
    torch.set_num_threads(1)
    with deepoffload.offload_context(host_budget="3MiB"):
        model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, 0)
    saving.IoEngine = partial(IoEngine, fault_script="op=write delay_ms=1000")
    deepoffload.TrainingState(model, optimizer).save(f"{folder}/saved", wait=False)
    def interrupt():
        while not threading._SHUTTING_DOWN:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
    if rank in interrupted:
        threading.Thread(target=interrupt, daemon=True).start()
    break
else:
    begin = time.monotonic()
    ended = dict(os.wait() for _ in children)
    seconds = time.monotonic() - begin
    print(json.dumps([[os.waitstatus_to_exitcode(ended[child]) for child in children], seconds]))
"""
"""Forks two processes, which end as an interpreter ends, with a save under way in which each write takes a second."""


@pytest.mark.parametrize("interrupted", [(0, 1), (1,)], ids=str)
def test_ctrl_c_at_the_end_gives_a_save_up_on_all_ranks(
    interrupted: tuple[int, ...], programs: Programs, tmp_path: Path
) -> None:
    environments = [launcher_environment(rank, 2, 1) for rank in range(2)]
    done = programs.run(PROGRAM, json.dumps([str(tmp_path), environments, interrupted]))
    said = [(tmp_path / f"said by {rank}").read_text() for rank in range(2)]
    codes, seconds = json.loads(done.stdout or "[[], 0]")
    assert codes == [-signal.SIGINT if rank in interrupted else 0 for rank in range(2)], (codes, said, done.stderr)
    assert not (tmp_path / "saved").exists() and seconds < 8, (seconds, said)
    own = "the end of the process waited for it, and was interrupted (Ctrl-C)"
    for rank, text in enumerate(said):
        reasons = [own] * (rank in interrupted) + [f"rank {1 - rank} has failed at TrainingState.save: {own}"]
        start = "global_step1 in the background failed; earlier checkpoints are intact: "
        assert any(text.endswith(f"{start}{reason}\n") for reason in reasons) and "Traceback" not in text, text
