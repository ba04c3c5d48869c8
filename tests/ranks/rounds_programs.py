"""What ranks do in the tests of rounds: each has shards of units, gathers them and adds up parts of them."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepoffload.errors import RankError
from deepoffload.ranks.collectives import wait_within
from deepoffload.ranks.exchange import Reduction
from deepoffload.ranks.group import open_group
from deepoffload.ranks.rounds import Payload, WaitFor, Want, WantKind
from deepoffload.ranks.service import SLICE_S, RoundService
from deepoffload.ranks.transport import open_exchange
from tests.support.rank_processes import LONG_S, own_group
from tests.support.waiting import wait_until

NUMEL = 64
LIMIT = timedelta(seconds=LONG_S)
UNITS = 4


class Flight:
    """A collective of gloo's, with what is done when it is over."""

    def __init__(self, work: Any, then: Callable[[], None] | None) -> None:
        self._work, self._then = work, then

    def ready(self) -> bool:
        return self._work.is_completed()

    def ready_within(self, limit_s: float) -> bool:
        return wait_within(self._work, limit_s)

    def arrive(self) -> None:
        self.ready_within(1.0)  # raises if it has failed
        if self._then is not None:
            self._then()
            self._then = None


class BetweenLooks(Flight):
    """One that comes between its second look and its third: one takes what has come, one chooses what to wait for."""

    def __init__(self, work: Any, then: Callable[[], None] | None) -> None:
        super().__init__(work, then)
        self.looks = 0
        self.came_s = self.taken_s = 0.0

    def ready(self) -> bool:
        self.looks += 1
        if self.looks == 2:
            self.came_s = time.monotonic()
        return self.looks > 2 and super().ready_within(LONG_S)

    def arrive(self) -> None:
        super().arrive()
        self.taken_s = time.monotonic()


class Side:
    """One rank: its shards, its whole copies and its sums. ``flight``: how transfers come."""

    def __init__(self, path: str, flight: type[Flight] = Flight) -> None:
        self.flight = flight
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(path, self.world_size)
        self.payload: Any = dist.ProcessGroupGloo(dist.PrefixStore("payload", store), self.rank, self.world_size, LIMIT)
        self.launched: list[tuple[str, int, tuple[int, ...]]] = []
        self.flights: dict[int, Flight] = {}
        self.reductions: list[Flight] = []
        self.whole: dict[int, Tensor] = {}
        self.sums = {unit: torch.zeros(NUMEL) for unit in range(UNITS)}
        self.parts: dict[int, list[Tensor]] = {unit: [] for unit in range(UNITS)}
        self.asked: set[int] = set()
        self.steps = 0
        self.fault: Exception | None = None
        self.service = RoundService(
            dist.PrefixStore("ours", store),
            self.rank,
            self.world_size,
            self.launch,
            lambda want: f"blocks.{want.unit}",
            timeout_s=LONG_S,
            ready_at_launch=flight is BetweenLooks,
        )

    # -- payload ----------------------------------------------------------------------------------------------------
    def launch(self, payload: Payload) -> Flight:
        if self.fault is not None:
            raise self.fault
        self.launched.append((payload.kind.name, payload.unit, payload.ranks))
        given = torch.full((NUMEL,), float(self.rank + 10 * payload.unit))
        if payload.kind is WantKind.REDUCE and self.rank in payload.ranks:
            given = self.parts[payload.unit].pop(0)
        got = [torch.empty(NUMEL) for _ in range(self.world_size)]
        flight = self.flight(self.payload.allgather(got, given), lambda: self.arrived(payload, got))
        if payload.kind is WantKind.GATHER:
            if self.rank in payload.ranks:
                self.flights[payload.unit] = flight
                self.asked.remove(payload.unit)
        else:
            self.reductions.append(flight)
        return flight

    def arrived(self, payload: Payload, got: list[Tensor]) -> None:
        if payload.kind is WantKind.GATHER:
            if self.rank in payload.ranks:
                self.whole[payload.unit] = torch.cat(got)
        else:
            for rank in payload.ranks:
                self.sums[payload.unit] += got[rank]

    # -- what a program does ----------------------------------------------------------------------------------------
    def prefetch(self, unit: int) -> None:
        if unit not in self.whole and unit not in self.flights and unit not in self.asked:
            self.asked.add(unit)
            self.service.post(Want(WantKind.GATHER, unit))

    def need(self, unit: int) -> Tensor:
        self.prefetch(unit)
        want = Want(WantKind.GATHER, unit)
        self.service.wait_launched(want)
        if unit not in self.whole:
            self.service.wait_flight(self.flights[unit], want)
        self.flights.pop(unit, None)
        expected = torch.cat([torch.full((NUMEL,), float(rank + 10 * unit)) for rank in range(self.world_size)])
        assert torch.equal(self.whole[unit], expected)
        return self.whole[unit]

    def drop(self, unit: int) -> None:
        if unit not in self.flights:
            self.whole.pop(unit, None)

    def reduce(self, unit: int) -> None:
        self.parts[unit].append(torch.randn(NUMEL, generator=torch.Generator().manual_seed(self.rank + 7 * self.steps)))
        self.service.post(Want(WantKind.REDUCE, unit))

    def forward_and_backward(self, skipped: tuple[int, ...] = (), pause_s: float = 0.0) -> None:
        order = [unit for unit in range(UNITS) if unit not in skipped]
        for backward in (False, True):
            phase = order[::-1] if backward else order
            for place, unit in enumerate(phase):
                self.need(unit)
                if place + 1 < len(phase):
                    self.prefetch(phase[place + 1])
                time.sleep(pause_s)
                self.drop(unit)
                if backward:
                    self.reduce(unit)

    def step(self, kind: WantKind = WantKind.STEP) -> WantKind:
        met = self.service.meet(kind)
        while self.reductions:
            self.service.wait_flight(self.reductions.pop(0), Want(kind))
        self.steps += met is WantKind.STEP
        return met

    def evaluate(self) -> None:
        for unit in range(UNITS):
            self.need(unit)
            self.drop(unit)

    def result(self) -> dict[str, Any]:
        return {
            "launched": self.launched,
            "sums": [self.sums[unit].tolist() for unit in range(UNITS)],
            "steps": self.steps,
            "stats": self.service.stats(),
            "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("deepoffload")],
        }


def over_a_transport(transport: str) -> tuple[bool, bool, int]:
    """Rounds in the store of a group that the environment describes, with payload as an engine moves it; rank 0 gathers
    alone while the others sit in a barrier of the default group. Says whether gather and sum are right, and nudges."""
    group = open_group(torch.device("cpu"), timeout_s=LONG_S)
    assert group is not None
    exchange = open_exchange(group, transport)
    rank, world_size = group.ranks.rank, group.ranks.world_size
    shard, part = torch.full((NUMEL,), float(rank)), torch.full((NUMEL * world_size,), float(rank + 1))
    whole, total = torch.zeros(NUMEL * world_size), torch.zeros(NUMEL)
    flights: list[Any] = []

    def launch(payload: Payload) -> Any:
        if payload.kind is WantKind.GATHER:
            flights.append(exchange.gather(shard, whole, "blocks.0"))
        else:
            reduction = Reduction(payload.ranks, NUMEL, torch.float32)
            scratch = torch.empty(exchange.scratch_bytes(reduction), dtype=torch.uint8)
            flights.append(exchange.send_parts(part, reduction, scratch, "blocks.0"))
        return flights[-1]

    service = RoundService(group.client("rounds"), rank, world_size, launch, str, timeout_s=LONG_S)
    if rank == 0:
        service.post(Want(WantKind.GATHER))
        service.wait_launched(Want(WantKind.GATHER))
        service.wait_flight(flights[0], Want(WantKind.GATHER))
    dist.barrier()
    flights[0].release()
    service.post(Want(WantKind.REDUCE))
    service.wait_launched(Want(WantKind.REDUCE))
    for start, parts in flights[1].chunks():
        for one in parts:
            total[start : start + one.numel()] += one
    service.meet(WantKind.STEP)
    service.close()
    exchange.close()
    group.close()
    expected = torch.arange(world_size).repeat_interleave(NUMEL)
    return (
        torch.equal(whole, expected),
        bool((total == world_size * (world_size + 1) / 2).all()),
        service.stats().nudges,
    )


# -- programs -------------------------------------------------------------------------------------------------------
def equal_steps(path: str, steps: int) -> dict[str, Any]:
    side = Side(path)
    for _ in range(steps):
        side.forward_and_backward()
        side.step()
    side.service.close()
    return side.result()


def unequal_everything(path: str) -> dict[str, Any]:
    """Skipped units, an evaluation on rank 0 while the others are in their own barrier, and uneven batches."""
    side = Side(path)
    own_group(f"{path}.own")
    for step in range(3 + 2 * side.rank):
        side.forward_and_backward(skipped=(1,) if (step + side.rank) % 2 else ())
        side.step()
        if step == 1:
            if side.rank == 0:
                for _ in range(3):
                    side.evaluate()
            dist.barrier()
    while side.step(WantKind.JOIN) is WantKind.STEP:
        pass
    side.service.close()
    dist.destroy_process_group()
    return side.result()


def come_between_looks(path: str) -> float:
    """Rank 1 comes to its step when rank 0 has waited there for longer than one wait. Says how long what came to this
    rank waited for it."""
    side = Side(path, BetweenLooks)
    side.reduce(0)
    if side.rank == 1:
        side.service.wait_reduced(0, WaitFor.ROOM)
        time.sleep(2 * SLICE_S)
    side.service.meet(WantKind.STEP)
    (flight,) = side.reductions
    side.service.close()
    assert isinstance(flight, BetweenLooks)
    return flight.taken_s - flight.came_s


def slow_rank(path: str, steps: int, pauses_s: tuple[float, ...]) -> dict[str, Any]:
    """Equal programs of unequal speed."""
    side = Side(path)
    for _ in range(steps):
        side.forward_and_backward(pause_s=pauses_s[side.rank])
        side.step()
    side.service.close()
    return side.result()


def evaluate_last(path: str) -> dict[str, Any]:
    """Rank 0 evaluates when the others have nothing left to do but to close."""
    side = Side(path)
    side.forward_and_backward()
    side.step()
    if side.rank == 0:
        side.evaluate()
    side.service.close()
    return side.result()


def trouble(path: str, what: str, timeout_s: float) -> dict[str, Any]:
    """Rank 1 does ``what`` in its second step; the others train. Returns what the others have met, and when.

    ``timeout_s``: the limit of waits when all are there; on a busy machine a process may start late.
    """
    side = Side(path)
    fell: list[str] = []
    threading.excepthook = lambda hook: fell.append("".join(traceback.format_exception(hook.exc_value)))
    side.forward_and_backward()
    side.step()
    side.service.timeout_s = timeout_s
    if side.rank == 1:
        side.evaluate()
    begin = time.monotonic()
    try:
        if side.rank == 1:
            cause_trouble(side, path, what)
        for _ in range(3):
            side.forward_and_backward()
            side.step()
    except (RankError, OSError) as error:
        text = str(error)
        seconds = time.monotonic() - begin
        Path(f"{path}.raised").touch()
        again = None
        if what == "SIGSTOP" and side.rank == 0:
            with open(f"{path}.pid", encoding="ascii") as file:
                os.kill(int(file.read()), signal.SIGCONT)
        try:
            side.service.pump()
        except RankError as error_again:
            again = str(error_again)
        side.service.close()
        raised = {"error": text, "again": again, "seconds": seconds, "class": type(error).__name__, "fell": fell}
        return side.result() | raised
    return {"error": None}


def cause_trouble(side: Side, path: str, what: str) -> None:
    if what in ("SIGKILL", "SIGSTOP"):
        with open(f"{path}.pid", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, what))
    if what == "raise":
        side.service.fail("ValueError: the batch is empty")
    if what.startswith("launch"):
        side.fault = OSError(28, "No space left on device")
    if what == "launch for a program that is elsewhere":
        wait_until(lambda: side.service.has_failed)
    if what == "busy":
        wait_until(Path(f"{path}.raised").exists)
    if what == "close":
        side.service.close()


def wait_elsewhere(side: Side) -> None:
    """Outside of rounds, for rank 1."""
    with side.service.away.waits("a save", "a save", None):
        while True:
            side.service.away.look_around(lambda: [1])
            time.sleep(0.1)


def interrupt_a_wait(side: Side) -> None:
    """Ctrl-C when the program waits for other ranks the next time."""
    before_s = side.service.stats().waited_s

    def interrupt() -> None:
        wait_until(lambda: side.service.stats().waited_s > before_s)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
