"""The way between this rank and the others, as copies and contributions use it: what is served, and what is waited for.

Every payload that the ranks agree on is launched here, by any thread that takes its round. Each has a number:
:mod:`deepoffload.copies.payload_numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepoffload.copies.payload_numbers import FIRST_STATE_NUMBER, MEETINGS, gradients_number
from deepoffload.errors import RankError
from deepoffload.memory.lock import SHIELD, BooksLock
from deepoffload.ranks.collectives import (
    LinkError,
    Work,
    as_bytes,
    has_gone,
    start_all_gather,
    start_broadcast,
    wait_within,
)
from deepoffload.ranks.edited import Edited
from deepoffload.ranks.exchange import Exchange
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.joint_task import JointTasks
from deepoffload.ranks.leaving import text_of
from deepoffload.ranks.limited_store import ANSWERS_WITHIN_S, LimitedStore
from deepoffload.ranks.notices import Notices
from deepoffload.ranks.round_runner import PayloadFlight
from deepoffload.ranks.rounds import Payload, WaitFor, Want, WantKind
from deepoffload.ranks.service import RoundService
from deepoffload.ranks.sums import SquareSum, packed, unpacked
from deepoffload.schedule.cost_model import LinkRates
from deepoffload.timeline import Timeline

SLICE_S = 1.0
"""A wait for sums looks this often whether another rank has gone or failed."""
LENGTH_BYTES = 8
"""In which the ranks say how long their messages are."""
SENT_AT_ONCE_BYTES = 4 << 20
"""Of rank 0's values."""


class Gatherer(Protocol):
    """What serves gathers of one block."""

    def serve(self, takers: tuple[int, ...]) -> PayloadFlight:
        """Start a gather that all ranks launch now. Called with the lock held, on every rank, also where the rank's
        program has not asked for it."""


class StateGatherer(Protocol):
    """What serves gathers of optimizer state, which has more numbers than are worth a list."""

    def serve(self, number: int, takers: tuple[int, ...]) -> PayloadFlight:
        """As :meth:`Gatherer.serve`."""

    def name(self, number: int) -> str:
        """What errors call it."""


class Given(Protocol):
    """A payload to which this rank has given bytes."""

    def releasable(self) -> bool:
        """Whether nobody reads these any more."""

    def releasable_within(self, limit_s: float) -> bool:
        """Wait for that in C++ at most so long. Returns ``releasable()``."""


class _Numbered(NamedTuple):
    """What has a number: how errors call it and its tensors, and what serves it."""

    name: str
    gatherer: Gatherer
    tensors: Sequence[str]


class _Release:
    """The end of the others' reading, as what a wait is for."""

    def __init__(self, flight: Given) -> None:
        self.ready = flight.releasable
        self.ready_within = flight.releasable_within

    def arrive(self) -> None:
        """Nothing arrives here."""


Reducer = Callable[[int, Payload], "PayloadFlight | None"]
"""Starts the reduction of a unit (its index)."""


class RankLink:
    """Args:
        group: who trains this model.
        exchange: moves the bytes.
        lock: the tier manager's: it guards what launches do. [Note: held] in ``ranks.service`` says who waits for what
            with it.
        timeout_s: how long a rank waits while nothing happens.
        rates: of ``exchange``, for plans; None where nobody plans with them.
        timeline: of what rounds and waits take; None: nothing is recorded.

    All methods that post or wait raise RankError, on all ranks the same one.

    Attributes:
        ranks: who is where.
        values_of_rank_0: as :class:`RankGroup` says.
        rounds: what waits for other ranks.
        on_reduce: starts reductions; none are posted before it is there.
        before_gather: called before a gather of a paged block is launched, with the bytes of paged blocks that gathers
            lease, those of this one among them.
        on_forward: called when the program enters the forward of units, by number, also in a backward.
        before_meeting: called before this rank waits at a step or at the end, in order.
        state: serves gathers of optimizer state; none are posted before it is there.
        notices: left for the other ranks and by them.
        tasks: what all ranks do together outside of rounds.
    """

    def __init__(
        self,
        group: RankGroup,
        exchange: Exchange,
        lock: BooksLock,
        *,
        timeout_s: float,
        rates: LinkRates | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.ranks = group.ranks
        self.exchange = exchange
        self.values_of_rank_0 = group.values_of_rank_0
        self.rates = rates
        self.timeout_s = timeout_s
        self.on_reduce: Reducer | None = None
        self.before_gather: Callable[[int], None] = lambda paged_bytes: None
        self.on_forward: Callable[[Sequence[int]], None] = lambda units: None
        self.before_meeting: list[Callable[[], None]] = []
        self.state: StateGatherer | None = None
        self._lock = lock
        self._shown: dict[int, _Numbered] = {}
        self._sums = group.new_private_group("sums")
        self._closed = self._ended = False
        self.rounds = RoundService(
            group.client("rounds"),
            self.ranks.rank,
            self.ranks.world_size,
            self._launch,
            self._name_of_want,
            timeout_s=timeout_s,
            lock=lock,
            abandon=exchange.abandon,
            outside=SHIELD.outside,
            let_go=lock.let_go,
            timeline=timeline,
            elsewhere=group.elsewhere(),
            ready_at_launch=exchange.ready_at_launch,
        )
        answers_within_s = min(ANSWERS_WITHIN_S, timeout_s)
        store = LimitedStore(group.client("notices"), answers_within_s)
        self.notices = Notices(store, self.rounds, self.ranks.world_size, self._has_gone, timeout_s)
        store = LimitedStore(group.client("tasks"), answers_within_s)
        waiting = Notices(store, self.rounds, self.ranks.world_size, self._has_gone, timeout_s)
        self.tasks = JointTasks(store, waiting, self.ranks.rank, self.ranks.world_size)

    def trains(self, models: Sequence[torch.nn.Module]) -> None:
        """Errors call them by their classes."""
        self.rounds.away.model = " and ".join(type(model).__name__ for model in models)

    # -- what is served --------------------------------------------------------------------------------------------

    def show(self, number: int, name: str, gatherer: Gatherer, tensors: Sequence[str] = ()) -> None:
        """From now on ``gatherer`` serves the gathers of ``number``; errors call it ``name``, and what is edited of it
        by the names of its ``tensors``."""
        with self._lock:
            self._shown[number] = _Numbered(name, gatherer, tensors)

    def show_no_longer(self, number: int) -> None:
        """Nobody asks for it any more."""
        with self._lock:
            self._shown.pop(number, None)

    def _launch(self, payload: Payload) -> PayloadFlight | None:
        if payload.kind is WantKind.REDUCE:
            if self.on_reduce is None:
                raise RuntimeError(f"nothing reduces {self._name_of(payload.unit)} here")
            return self.on_reduce(payload.unit // 2, payload)
        if payload.unit >= FIRST_STATE_NUMBER and self.state is not None:
            return self.state.serve(payload.unit, payload.ranks)
        known = self._shown.get(payload.unit)
        if known is None:
            raise RuntimeError(f"rank {self.ranks.rank} has no {self._name_of(payload.unit)} to give")
        return known.gatherer.serve(payload.ranks)

    def _name_of(self, number: int) -> str:
        if number >= FIRST_STATE_NUMBER and self.state is not None:
            return self.state.name(number)
        if number in MEETINGS:
            return MEETINGS[number]
        known = self._shown.get(number) or self._shown.get(number ^ 1)
        return f"block {number}" if known is None else known.name

    def _name_of_want(self, want: Want) -> str:
        known, tensor = self._shown.get(want.unit), Edited.unpacked(want.content).tensor
        if want.kind is WantKind.EDIT and known is not None and tensor < len(known.tensors):
            return known.tensors[tensor]
        return self._name_of(want.unit)

    def hold(self) -> AbstractContextManager[None]:
        """While this lasts nothing is launched here. To be called with the lock held, by what must not be interrupted
        by the update of another unit, such as an update."""
        return self.rounds.hold()

    @property
    def is_held(self) -> bool:
        """Whether nothing may be launched now, so that nobody may wait for a launch."""
        return self.rounds.is_held

    def pump(self) -> None:
        """Take what is over and launch what is agreed on, unless that is held. Does not wait for other ranks."""
        self.rounds.pump()

    # -- gathers ---------------------------------------------------------------------------------------------------

    def post_gather(self, number: int) -> None:
        """Ask for the whole of a block. Once, until it is launched. Launches nothing."""
        self.rounds.queue(Want(WantKind.GATHER, number))

    def wait_launched(self, number: int) -> None:
        """Return when a gather that was posted has been launched. Serves other ranks meanwhile."""
        self.rounds.wait_launched(Want(WantKind.GATHER, number))

    def lose(self, number: int) -> None:
        """Raise what all ranks raise where a gather was begun and never launched: another rank has gone meanwhile, and
        this one's other thread has met that."""
        with self.rounds.judged(Want(WantKind.GATHER, number)):
            raise LinkError("the gather was not launched")

    def wait_gathered(self, number: int, flight: PayloadFlight, *, serve: bool) -> None:
        """Return when a gather has arrived. ``serve``: launch what others ask for meanwhile."""
        if serve:
            self.rounds.wait_flight(flight, Want(WantKind.GATHER, number))
        else:
            self._wait_out(flight, number)

    def is_released(self, number: int, flight: Given) -> bool:
        """Whether nobody reads any more what this rank has given to a gather."""
        with self.rounds.judged(Want(WantKind.GATHER, number)):
            return flight.releasable()

    def wait_released(self, number: int, flight: Given) -> None:
        """Return when that is so. Nothing is launched meanwhile."""
        self._wait_out(_Release(flight), number)

    def _wait_out(self, flight: PayloadFlight, number: int) -> None:
        """Wait where nothing may be launched. What has been launched lands before, if it may: another rank may be in a
        launch that waits for that."""
        want = Want(WantKind.GATHER, number)
        self.rounds.take_all(want)
        self.rounds.wait_out(flight, want)

    # -- reductions ------------------------------------------------------------------------------------------------

    def post_reduce(self, unit_index: int, may_have_more: bool) -> None:
        """Say that this rank has its part of a unit's gradients, or one of several. Launches nothing."""
        self.rounds.queue(Want(WantKind.REDUCE, gradients_number(unit_index), may_have_more))

    def end_backward(self) -> None:
        """Say, with what is said next, that this rank has announced all its parts in this backward."""
        self.rounds.end_backward()

    def wait_reduced(self, unit_index: int, reason: WaitFor, limit_s: float = math.inf) -> bool:
        """Return whether parts of a unit's gradients have been launched: when they have, for this ``reason``, or when
        about ``limit_s`` are over. Serves other ranks meanwhile."""
        return self.rounds.wait_reduced(gradients_number(unit_index), reason, limit_s)

    def awaits_parts(self, unit_index: int, *, ended: bool = True) -> bool:
        """Whether parts of a unit's gradients are still to be launched."""
        return self.rounds.awaits_parts(gradients_number(unit_index), ended=ended)

    # -- steps -----------------------------------------------------------------------------------------------------

    def meet_step(self) -> tuple[int, ...]:
        """Return when all ranks are at their step, and everything that was launched before has arrived here. Returns
        the ranks that make the step because they have joined."""
        self._meet(WantKind.STEP)
        return self.rounds.joined

    def meet_join(self) -> bool:
        """Return when all ranks are at their step or have joined, as this one. Returns whether some are at their step,
        which this rank makes with them."""
        return self._meet(WantKind.JOIN) is WantKind.STEP

    def _meet(self, kind: WantKind) -> WantKind:
        for prepare in self.before_meeting:
            prepare()
        met = self.rounds.meet(kind)
        self.rounds.take_all(Want(kind))
        return met

    def exchange_sums(self, part: SquareSum) -> SquareSum:
        """The sum over all ranks, the same on each. Collective: all ranks call it in the same order, when they have
        met. Nobody is served meanwhile."""
        return unpacked(self._gathered(packed(part)), self.ranks.world_size)

    def exchange_messages(self, mine: bytes) -> list[bytes]:
        """What every rank says, in rank order. Collective as :meth:`exchange_sums`. For rare, short ones."""
        lengths = self._gathered(len(mine).to_bytes(LENGTH_BYTES, "little"))
        nbytes = [
            int.from_bytes(lengths[at : at + LENGTH_BYTES], "little") for at in range(0, len(lengths), LENGTH_BYTES)
        ]
        longest = max(nbytes)
        said = self._gathered(mine.ljust(longest, b"\0")) if longest else b""
        return [said[rank * longest : rank * longest + count] for rank, count in enumerate(nbytes)]

    def _gathered(self, mine: bytes) -> bytes:
        """The bytes of all ranks, one after the other; each gives as many."""
        gathered = torch.empty(self.ranks.world_size * len(mine), dtype=torch.uint8, device="cpu")
        part = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._finish(lambda: start_all_gather(as_bytes(gathered), part, self._sums))
        return gathered.numpy().tobytes()

    def take_from_rank_0(self, values: Tensor) -> None:
        """Let ``values`` (uint8, one dimension) have the bytes that it has on rank 0. Collective as
        :meth:`exchange_sums`."""
        for part in torch.split(values, SENT_AT_ONCE_BYTES):
            sent = part.clone()  # a wait that ends early leaves the transfer to torch, which keeps this one
            self._finish(lambda sent=sent: start_broadcast(sent, 0, self._sums))  # type: ignore[misc]
            part.copy_(sent)

    def _finish(self, start: Callable[[], Work]) -> None:
        """Start a collective and wait until it is over."""
        self.rounds.check()
        with self.rounds.judged(Want(WantKind.STEP)):
            work, waited_s = start(), 0.0
            while not SHIELD.outside(wait_within, work, SLICE_S):
                waited_s += SLICE_S
                self._look_after(waited_s)

    def _look_after(self, waited_s: float) -> None:
        """Raise when the sums of the others will not come."""
        self.rounds.hear()
        for rank in range(self.ranks.world_size):
            if self._has_gone(rank):
                raise RankError(f"rank {rank} has gone, its connection is closed")
        if waited_s >= self.timeout_s:
            raise RankError(f"not every rank has sent its sum within {self.timeout_s:g} s")

    def meet_edit(self, number: int, edited: Edited) -> None:
        """Return when all ranks are about to change what their programs see of a tensor, or when all have done so. They
        are served meanwhile. Not inside :meth:`hold`.

        Raises:
            RankError: another rank edits another tensor, or has written other values.
        """
        self.rounds.meet(WantKind.EDIT, number, edited.packed())

    def _has_gone(self, rank: int) -> bool:
        return has_gone(rank, self._sums)

    # -- the end ---------------------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue, and why."""
        self.rounds.fail(message)

    def close(self) -> None:
        """Wait until all ranks close, serve them until then, and end. Idempotent.

        Raises:
            RankError: others train on. This rank's part has ended all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._prepare_end()
            self.rounds.close()
        except BaseException:
            self.exchange.abandon()
            raise
        if self.rounds.has_failed:
            self.exchange.abandon()
        else:
            self.exchange.close()
        self._ended = True

    def _prepare_end(self) -> None:
        try:
            if not self.rounds.has_failed:
                for prepare in self.before_meeting:
                    prepare()
        except BaseException as error:
            if not self.rounds.has_failed:
                self.rounds.fail(text_of(error))
            self.rounds.close()  # waits for nobody, as the rank has failed
            raise

    @property
    def is_over(self) -> bool:
        """Whether no other rank uses memory of this one any more, because all have closed or one has failed."""
        return self._ended or self.rounds.has_failed

    def stats(self) -> dict[str, float]:
        """Numbers of the run so far."""
        stats = self.rounds.stats()
        rates = {} if self.rates is None else asdict(self.rates)
        return {
            "rounds": stats.rounds,
            "mixed_rounds": stats.mixed_rounds,
            "nudges": stats.nudges,
            "rounds_answered": stats.answers,
            "rank_wait_s": stats.waited_s,
            **{f"rank_{rank}_waited_for_s": seconds for rank, seconds in enumerate(stats.waited_for_s)},
            "gather_bytes": self.exchange.gather_bytes,
            "reduce_bytes": self.exchange.part_bytes,
            **{f"link_{name}": rate for name, rate in rates.items()},
        }
