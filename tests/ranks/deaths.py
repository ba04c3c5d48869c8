"""A rank dies, stops or fails in the middle of training, at a random place: every other rank raises an error that names
it, soon, and nothing is left. ``python -m tests.ranks.deaths --places 100`` tries so many places."""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import re
import resource
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepoffload import CPUAdamW, TrainingState, offload_context
from deepoffload.checkpoint.background import THREAD_NAME
from deepoffload.checkpoint.source import open_checkpoint
from deepoffload.checkpoint.tags import folder_to_load
from deepoffload.errors import DeepOffloadError, RankError
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import Bandwidth, measure_bandwidth
from deepoffload.runtime import disk
from tests.ranks.training_programs import MODELS, loss_of
from tests.support.rank_processes import LONG_S, Ended, run_ranks

TIMEOUT_S = 2.0
"""``ranks.timeout_s`` where a rank stops; a rank that has gone is noticed earlier."""
STOP_TOLD_WITHIN_S = 3.0
"""After that: a wait looks once a second, and a rank that is asked where it is has 1.5 s to answer."""
SOON_S = 5.0
LATE_S = 1.0
"""What a machine that has other things to do adds to each limit."""
ENDS_WITHIN_S = 90.0
KINDS = ("loader", "forward", "backward", "guess", "early", "save")
"""Of places."""
UPDATE_S_SHARE = 0.02
"""An update inside backward, a guess too, is over so much sooner than what else a rank is at when it dies."""
FIRST_CHUNK, CHUNKS_PER_PLACE = 10, 5
"""Of the swap file's chunks in training, after how many the disk fails at place 0, and how many more come in the time
of a place. All that follow fail: one alone may be read ahead, or for a save, and once more when it is needed."""
STACKS_AFTER_S = 85.0
"""Who has not ended then prints where its threads are. That may crash a process whose threads run: not before the run
has failed anyway."""
STEPS = 400
"""More than any rank makes before one of them dies."""


@dataclass(frozen=True)
class Death:
    """How and where one rank ends.

    Attributes:
        way: of ``WAYS``.
        rank: which one.
        place: it is at so many places (batches, forwards and backwards of layers) before it ends.
        later_s: signals come so much later, where the rank is then.
        saves: saves of the training state are under way meanwhile, for which the program does not wait.
    """

    way: str
    rank: int
    place: int
    later_s: float
    world_size: int
    transport: str
    step_overlap: str = "deferred"
    timeout_s: float = TIMEOUT_S
    saves: bool = False

    @property
    def stops(self) -> bool:
        """The process stays, and does nothing more."""
        return self.way.startswith("SIGSTOP")

    @property
    def limit_s(self) -> float:
        """How long after it the others may raise, on a machine that does nothing else."""
        return self.timeout_s + STOP_TOLD_WITHIN_S if self.stops else SOON_S


class _Places:
    """Counts the places that a rank comes to, and lets it die at one of them."""

    def __init__(self, death: Death, folder: Path) -> None:
        self._death, self._folder = death, folder
        self._count = 0
        self._is_over = death.rank != int(os.environ["RANK"])

    def at(self, kind: str) -> None:
        """The rank comes to a place of this kind; where it dies of its own error, these are the only ones that
        count."""
        way = self._death.way
        self._count += 1
        wanted = way.split()[-1]
        wrong_kind = wanted in KINDS and kind != wanted
        if self._is_over or self._count < self._death.place or wrong_kind or way == "EIO":
            return  # the disk chooses the place
        self._is_over = True
        if way.startswith("SIG"):
            threading.Timer(self._death.later_s * (UPDATE_S_SHARE if kind == wanted else 1.0), self._die).start()
            return
        self.note()
        if way == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        else:
            raise ArithmeticError(f"the {way} is out of order")

    def note(self) -> None:
        (self._folder / "died").write_text(str(time.monotonic()))

    def _die(self) -> None:
        self.note()
        os.kill(os.getpid(), getattr(signal, self._death.way.split()[0]))


def _watch(layer: nn.Module, at: Callable[[str], None]) -> None:
    """The forwards and backwards of a layer are places."""
    layer.register_forward_pre_hook(lambda *_: at("forward"))
    layer.register_forward_hook(lambda _, inputs, output: output.register_hook(lambda _: at("backward")) and None)


class _Watched(CPUAdamW):
    """An optimizer whose updates inside backward are places, too: those on a guess, and those for good."""

    at: Callable[[str], None]

    def guess_step(self, handles: Any) -> Any:
        self.at("guess")
        return super().guess_step(handles)

    def update_early(self, handles: Any, *, wait: bool) -> None:
        self.at("early")
        super().update_early(handles, wait=wait)


def _measured_by_another(path: str, io: IoEngine, *, key: str) -> Bandwidth:
    """One rank measures the disk, where that has not been done before: these chunks do not count."""
    with closing(IoEngine()) as plain:
        return measure_bandwidth(path, plain, key=key)


def train(death: Death, nvme_path: str, folder: str) -> tuple[str, str, float, list[str]]:
    """Train until something goes wrong. Returns the class of the error, its text, when it was raised, and which of our
    threads are left when the engine is closed."""
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
    places = _Places(death, Path(folder))
    config = {
        "host_budget": "4MiB",  # so that something is on the disk
        "nvme_budget": "64MiB",
        "nvme_path": nvme_path,
        "ranks": {"timeout_s": death.timeout_s if death.stops else LONG_S, "transport": death.transport},
        "step_overlap": death.step_overlap,
    }
    if death.way == "EIO" and death.rank == int(os.environ["RANK"]):
        disk.IoEngine = partial(IoEngine, fault_script=f"after={FIRST_CHUNK + CHUNKS_PER_PLACE * death.place} errno=5")
        disk.measure_bandwidth = _measured_by_another  # type: ignore[assignment]
    torch.manual_seed(5)
    context = offload_context(config)
    with context:
        model: Any = MODELS["gpt"]()
    for block in model.blocks:
        _watch(block, places.at)
    clip = 1.0 if death.step_overlap == "deferred" else None
    optimizer = _Watched(model.parameters(), lr=1e-3, max_grad_norm=clip)
    optimizer.at = places.at
    state = TrainingState(model, optimizer)
    try:
        for step in range(STEPS):
            if death.saves and step % 2:
                places.at("save")
                state.save(Path(folder) / "saved", keep_last=1, wait=False)
            places.at("loader")
            loss_of(model, "gpt", step).backward()
            optimizer.step()
            optimizer.zero_grad()
    except (ArithmeticError, DeepOffloadError) as error:
        raised = time.monotonic()
        if death.way == "EIO" and death.rank == int(os.environ["RANK"]):
            places.note()  # nobody knows the moment
        said = type(error).__name__, str(error), raised
    else:
        said = "nothing", "", time.monotonic()
    with suppress(DeepOffloadError):
        context.engine.close()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(SOON_S)  # it may still complete what was copied before
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("deepoffload")]
    faulthandler.cancel_dump_traceback_later()
    return *said, threads


def check(death: Death, nvme_path: Path, folder: Path, late_s: float = LATE_S) -> list[float]:
    """Let a rank die, and look at the others. The store is in rank 0, so it may die with it.

    Returns:
        After how many seconds each of the others has raised.
    """
    stops = death.rank if death.stops else None
    arguments = death, str(nvme_path), str(folder)
    limit_s = ENDS_WITHIN_S + 2 * late_s
    ended = run_ranks(train, death.world_size, *arguments, limit_s=limit_s, stops=stops, rank_0_has_store=True)
    died = float((folder / "died").read_text())
    seconds: list[float] = []
    for rank, one in enumerate(ended):
        if rank == death.rank:
            _check_own_end(death, one)
            continue
        assert one.error is None and one.exit_code == 0, f"{death}: rank {rank}: {one.text}"
        kind, text, raised, threads = one.value
        assert kind == RankError.__name__, f"{death}: rank {rank} has {kind}: {text}"
        assert re.search(rf"ranks? {death.rank}\b", text), f"{death}: rank {rank} says {text}"
        after_s = raised - died
        assert after_s < death.limit_s + late_s, f"{death}: rank {rank} raises after {after_s:.1f} s: {text}"
        seconds.append(after_s)
        waits_for_store = death.stops and death.rank == 0  # which lives in that process
        assert not threads or waits_for_store, f"{death}: rank {rank} is left with {threads}"
    left = list(nvme_path.iterdir())
    assert not left, f"{death}: {left} is left"
    newest = folder_to_load(str(folder / "saved"), None) if death.saves and (folder / "saved").exists() else None
    if newest is not None:
        with open_checkpoint(newest, lambda _: None):
            """It is complete."""
    return seconds


def _check_own_end(death: Death, own: Ended) -> None:
    if death.way.startswith("SIG"):
        assert own.exit_code == -signal.SIGKILL, f"{death}: {own}"
        return
    assert own.error is None and own.exit_code == 0, f"{death}: {own.text}"
    kind, text, _, threads = own.value
    expected = ("IoFailure", "RankError") if death.way in ("disk full", "EIO") else ("ArithmeticError",)
    assert kind in expected and not threads, f"{death}: {kind}, {threads}: {text}"


WAYS = ("SIGKILL", "SIGSTOP", "forward", "backward", "loader", "disk full", "EIO")
MORE_WAYS = {"speculative": ("SIGKILL guess", "guess"), "in_backward": ("SIGKILL early", "early")}
"""In updates inside backward."""


def deaths(
    count: int, seed: int, step_overlap: str = "deferred", world_size: int = 2, *, saves: bool = False
) -> list[Death]:
    """So many, each way about as often as the others."""
    dice = random.Random(seed)
    ways = WAYS + MORE_WAYS.get(step_overlap, ()) + (("SIGSTOP save",) if saves else ())
    return [
        Death(
            ways[number % len(ways)],
            dice.randrange(world_size),
            dice.randrange(1, 60),
            dice.random() * 0.05,
            world_size,
            ("memory", "group")[number // len(ways) % 2],
            step_overlap,
            saves=saves,
        )
        for number in range(count)
    ]


def campaign(found: list[Death], nvme_path: Path, late_s: float, limit_s: float) -> None:
    """Try all of them, one after the other, until they have taken ``limit_s``."""
    seconds: dict[str, list[float]] = {}
    started = time.monotonic()
    for number, death in enumerate(found):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            if begin - started >= limit_s:
                break
            after_s = check(death, nvme_path, Path(folder), late_s)
            seconds.setdefault(death.way, []).extend(after_s)
            raised = ", ".join(f"{one:.2f}" for one in after_s)
            print(f"{number + 1:4} {time.monotonic() - begin:5.1f} s, raised after {raised} s  {death}", flush=True)
    for way, known in seconds.items():
        median_s, longest_s = statistics.median(known), max(known)
        print(f"{way}: {len(known)} ranks raised, median {median_s:.2f} s, longest {longest_s:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="of these, begin with this one")
    parser.add_argument("--step-overlap", choices=("deferred", "speculative", "in_backward"), default="deferred")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", action="store_true", help="with saves in the background")
    parser.add_argument("--late-s", type=float, default=LATE_S, help="what other work of the machine adds to limits")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no more after so long")
    chosen = parser.parse_args()
    found = deaths(chosen.places, chosen.seed, chosen.step_overlap, chosen.ranks, saves=chosen.saves)
    with tempfile.TemporaryDirectory() as nvme_path:
        campaign(found[chosen.first :], Path(nvme_path), chosen.late_s, chosen.limit_s)


if __name__ == "__main__":
    main()
