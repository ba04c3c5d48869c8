"""The planner played in simulated time: how long a step takes when transfers and computing overlap as they really do.

What to move and when is decided by the same functions as in the engine (``schedule.planner``), called at the same
places. Only the bytes and the seconds are simulated: one program that computes, or launches what a device computes, and
one disk whose directions share their bandwidth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepoffload.errors import BudgetError
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.cost_model import Bandwidths
from deepoffload.schedule.events import Phase
from deepoffload.schedule.planner import MoveKind, plan_prefetch, plan_write_back
from deepoffload.schedule.simulated_device import DeviceWork, TimedDevice
from deepoffload.schedule.simulated_disk import Disk
from deepoffload.schedule.trace import Trace
from deepoffload.schedule.uses import Use
from deepoffload.schedule.victims import choose_victim
from deepoffload.schedule.whole_copies import WholeCopies


@dataclass(frozen=True)
class TimedUse:
    """A use of blocks and the seconds of computing that follow when they are there.

    With several ranks: ``shown`` are blocks of which the program sees whole copies, ``changed`` those whose copies are
    wrong after it, and ``link_s`` the seconds in which gradients go to other ranks. With a device these are in the
    work's landing, and the bytes of the copies go to it.
    With a device: ``seconds`` are the program's, in which it launches ``device_work``. An update that is
    ``in_backward`` is made when the gradients have come, which the program notices where it launches more.
    ``again``: a forward that runs again in backward, behind a checkpoint. Its seconds are backward's.
    """

    use: Use
    phase: Phase
    seconds: float
    link_s: float = 0.0
    shown: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    device_work: DeviceWork | None = None
    in_backward: bool = False
    again: bool = False

    @property
    def spent_in(self) -> Phase:
        """The part of the step that its seconds belong to."""
        return Phase.BACKWARD if self.again else self.phase


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by phase, waiting among them, and what the disk did meanwhile. ``busy_s``: of the disk.
    ``link_s``: of transfers between ranks; ``gathered_bytes``: what came from others for whole copies.
    ``backward_wait_s``: waiting in backward. ``to_device_bytes``, ``from_device_bytes``: over the bus of a device, busy
    in either direction for ``bus_s``."""

    forward_s: float
    backward_s: float
    update_s: float
    wait_s: float
    backward_wait_s: float
    busy_s: float
    faults: int
    read_bytes: int
    written_bytes: int
    link_s: float = 0.0
    gathered_bytes: int = 0
    to_device_bytes: int = 0
    from_device_bytes: int = 0
    bus_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


_NOT_IN_MEMORY = (BlockState.EMPTY, BlockState.ON_NVME)


class TimedRun:
    """A program with its memory and disk, played use by use.

    It has many attributes, because it stands for three things of the engine (memory, transfers, prefetcher), whose
    states one event changes together.

    Args:
        nbytes: of each block in memory. disk_nbytes: what of it moves.
        static: blocks that are in memory from beginning to end. empty: blocks without content; all others
            lie on disk at the beginning.
        write_behind_share: most of the memory that may be on its way to the disk without anybody waiting for it.
        computing_share: see ``Disk``.
        events_per_plan: how many events may pass without a plan, where nothing can change (1: every event plans).
        busy_transfers: blocks on their way in each direction that are enough until the next event or two.
        copies: of blocks that several ranks store; None with one rank.
        device: what computes; None where the program does it itself.
    """

    def __init__(
        self,
        nbytes: Mapping[int, int],
        disk_nbytes: Mapping[int, int],
        capacity_bytes: int,
        bandwidths: Bandwidths,
        *,
        lookahead_bytes: int,
        reserve_bytes: int = 0,
        static: frozenset[int] = frozenset(),
        empty: Iterable[int] = (),
        write_behind_share: float = 0.5,
        computing_share: float = 1.0,
        events_per_plan: int = 1,
        busy_transfers: int = 3,
        copies: WholeCopies | None = None,
        device: TimedDevice | None = None,
    ) -> None:
        self.trace = Trace()
        self.disk = Disk(bandwidths, computing_share)
        self.ever_written: set[int] = set()
        self._nbytes = nbytes
        self._disk_nbytes = disk_nbytes
        self._capacity_bytes = capacity_bytes
        self._resident: set[int] = set(static).difference(empty)
        self._free_bytes = capacity_bytes - sum(nbytes[block] for block in self._resident)
        self._lookahead_bytes = lookahead_bytes
        self._reserve_bytes = reserve_bytes
        self._static = static
        self._write_behind_bytes = capacity_bytes * write_behind_share
        self._state = dict.fromkeys(nbytes, BlockState.ON_NVME)
        self._state.update(dict.fromkeys(self._resident, BlockState.DIRTY))
        self._state.update(dict.fromkeys(empty, BlockState.EMPTY))
        self._in_state: dict[BlockState, set[int]] = {state: set() for state in BlockState}  # of those that may leave
        for block, state in self._state.items():
            if block not in static:
                self._in_state[state].add(block)
        self._writing: set[int] = set()
        self._reading: set[int] = set()
        self._events_per_plan = events_per_plan
        self._busy_transfers = busy_transfers
        self._copies = copies
        self._device = device
        self._unplanned = 0
        self._settled = 0
        self._predicted = False
        self._stuck_at: tuple[int, int] | None = None
        self._stamps: dict[int, int] = {}
        self._uses = 0
        self._faults = self._read_bytes = self._written_bytes = 0

    # -- the program -------------------------------------------------------------------------------------------------

    def step(self, uses: Sequence[TimedUse], discards: Iterable[int] = ()) -> StepTimes:
        """Play one step. Raises ``BudgetError`` when the blocks of one event do not fit.

        ``discards``: blocks that are worthless when it is over (gradients, for ``zero_grad()``).
        """
        spent = dict.fromkeys(Phase, 0.0)
        waited = dict.fromkeys(Phase, 0.0)
        busy_before, link_s, gathered_bytes = self.disk.busy_s, 0.0, 0
        in_before, out_before, bus_before_s = self._passed()
        self._faults = self._read_bytes = self._written_bytes = 0
        for timed in self._in_time(uses, spent):
            begun = self.disk.now
            waited[timed.spent_in] += self._use(timed)
            gather_s, nbytes = self._gather(timed)
            self._compute(timed, timed.seconds + timed.link_s)
            link_s, gathered_bytes = link_s + timed.link_s + gather_s, gathered_bytes + nbytes
            link_s += 0.0 if timed.device_work is None else timed.device_work.link_s
            self._after(timed.use)
            spent[timed.spent_in] += self.disk.now - begun
        self.trace.end_of_step()
        self._pump(())
        for block in discards:
            self._drop(block)
        in_after, out_after, bus_after_s = self._passed()
        return StepTimes(
            forward_s=spent[Phase.FORWARD],
            backward_s=spent[Phase.BACKWARD],
            update_s=spent[Phase.UPDATE],
            wait_s=sum(waited.values()),
            backward_wait_s=waited[Phase.BACKWARD],
            busy_s=self.disk.busy_s - busy_before,
            faults=self._faults,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            link_s=link_s,
            gathered_bytes=gathered_bytes,
            to_device_bytes=in_after - in_before,
            from_device_bytes=out_after - out_before,
            bus_s=bus_after_s - bus_before_s,
        )

    def _passed(self) -> tuple[int, int, float]:
        """Bytes that have gone to the device so far, and that have come from it; and the seconds that took."""
        device = self._device
        return (0, 0, 0.0) if device is None else (device.in_bytes, device.out_bytes, device.bus_s())

    def _in_time(self, uses: Sequence[TimedUse], spent: dict[Phase, float]) -> Iterator[TimedUse]:
        """The uses in the order in which the program comes to them. With a device, updates in backward wait for their
        gradients: those that have come are made where a visit is launched, the others when backward has ended. Then
        ``optimizer.step()`` waits for all gradients."""
        device = self._device
        if device is None:
            yield from uses
            return
        late: deque[tuple[int, TimedUse]] = deque()
        ends = [number for number, use in enumerate(uses, 1) if use.in_backward or use.phase is Phase.BACKWARD]
        end = max(ends, default=0)
        for timed in uses[:end]:
            if timed.in_backward:
                late.append((device.launched, timed))
                continue
            self._until(device.land(self.disk.now), spent)
            while late and device.has_landed(late[0][0], self.disk.now):
                yield late.popleft()[1]
            yield timed
        for visit, update in late:
            self._wait_for_device(visit, spent)
            yield update
        self._wait_for_device(device.launched, spent)
        yield from uses[end:]

    def _wait_for_device(self, visit: int, spent: dict[Phase, float]) -> None:
        if self._device is not None:
            self._until(self._device.wait_for(visit, self.disk.now), spent)

    def _until(self, end: float, spent: dict[Phase, float]) -> None:
        begun = self.disk.now
        self.disk.advance(end)
        spent[Phase.BACKWARD] += self.disk.now - begun

    def _compute(self, timed: TimedUse, seconds: float) -> None:
        now = self.disk.now
        if self._device is None or (timed.device_work is None and timed.phase is not Phase.UPDATE):
            self.disk.advance(now + seconds)
        elif timed.device_work is None:
            self.disk.advance(self._device.update(now, seconds))
        else:
            self.disk.advance(self._device.launch(now + seconds, timed.device_work))
            self._device.uses(timed.shown)

    def _gather(self, timed: TimedUse) -> tuple[float, int]:
        """Have the whole copies that a use shows, on their way to a device where one computes. Returns the seconds that
        it takes to gather them, and the bytes from other ranks."""
        copies = self._copies
        if copies is None:
            return 0.0, 0
        for block in timed.changed:
            copies.drop(block)
        coming, leaving = copies.need(timed.shown, self._next_use)
        for block in coming:
            self.disk.advance(self.disk.now + copies.gather_s[block])
            if self._device is not None:
                self.disk.advance(self._device.send(self.disk.now, copies.sent_bytes[block], leaving))
        return sum(copies.gather_s[block] for block in coming), sum(copies.from_others_bytes[block] for block in coming)

    def _use(self, timed: TimedUse) -> float:
        """Bring the blocks of an event; returns the seconds waited. Of what is there as a whole copy, nothing else is
        needed."""
        begun, use = self.disk.now, timed.use
        blocks = use.event.blocks
        whole = () if self._copies is None else tuple(block for block in timed.shown if block in self._copies)
        self._predicted = self.trace.observe(use.event)
        self._pump(blocks)
        for block in dict.fromkeys(blocks):
            if block in use.named or block in whole:
                continue
            self._uses += 1
            self._stamps[block] = self._uses
            self._bring(block, blocks)
        for block in use.writes:
            if self._state[block] is BlockState.WRITING:
                self._settle(block)
            self._to(block, BlockState.DIRTY)
        return self.disk.now - begun

    def _after(self, use: Use) -> None:
        for block in use.drops:
            self._drop(block)

    def _drop(self, block: int) -> None:
        if self._state[block] in (BlockState.WRITING, BlockState.READING):
            self._settle(block)
        if block in self._resident:
            self._forget(block)
        self._to(block, BlockState.EMPTY)

    def _bring(self, block: int, in_use: Sequence[int]) -> None:
        state = self._state[block]
        if state is BlockState.READING:
            self._settle(block)
        elif state in _NOT_IN_MEMORY:
            self._make_room(self._nbytes[block], in_use)
            self._hold(block)
            if state is BlockState.EMPTY:
                self._to(block, BlockState.DIRTY)
                return
            self._faults += 1
            self._read(block, urgent=True)
            self._settle(block)

    # -- what the pager does at every event ----------------------------------------------------------------------------

    def _pump(self, in_use: Sequence[int]) -> None:
        self._collect()
        if self._may_wait():
            return
        self._write_behind(in_use)
        moves = plan_prefetch(
            self.trace.upcoming(),
            is_resident=lambda block: self._state[block] is not BlockState.ON_NVME,
            nbytes=self._nbytes.__getitem__,
            free_bytes=self._free_bytes,
            evictable=self._in_state[BlockState.CLEAN].difference(in_use),
            next_use=self._next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=self._static,
            is_empty=lambda block: self._state[block] is BlockState.EMPTY,
            reserve_bytes=self._reserve_bytes,
            aside_bytes=sum(
                self._nbytes[b] for b in in_use if self._state[b] in (BlockState.EMPTY, BlockState.ON_NVME)
            ),
        )
        for move in moves:
            if move.kind is MoveKind.EVICT:
                self._evict(move.block)
            else:
                self._hold(move.block)
                self._read(move.block, urgent=False)
        self._stuck_at = None if moves else (self._settled, self._free_bytes)

    def _may_wait(self) -> bool:
        """As the prefetcher leaves planning to a later event: enough is on its way, or nothing has changed."""
        self._unplanned += 1
        if self._unplanned < self._events_per_plan and self._predicted:
            busy = min(len(self._reading), len(self._writing)) >= self._busy_transfers
            if busy or self._stuck_at == (self._settled, self._free_bytes):
                return True
        self._unplanned = 0
        return False

    def _write_behind(self, in_use: Sequence[int]) -> None:
        budget = self._write_behind_bytes - sum(self._disk_nbytes[block] for block in self._writing)
        chosen = plan_write_back(
            self._in_state[BlockState.DIRTY].difference(in_use),
            self.trace.upcoming(),
            nbytes=self._nbytes.__getitem__,
            next_use=self._next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=self._static,
        )
        for block in chosen:
            if budget >= self._disk_nbytes[block]:
                self._write(block)
                budget -= self._disk_nbytes[block]

    def _next_use(self, block: int) -> float:
        distance = self.trace.next_use(block)
        return distance if distance < math.inf else 1e12 - self._stamps.get(block, 0)

    # -- memory and transfers ------------------------------------------------------------------------------------------

    def _to(self, block: int, state: BlockState) -> None:
        if block not in self._static:
            self._in_state[self._state[block]].discard(block)
            self._in_state[state].add(block)
        self._state[block] = state

    def _is_clean(self, block: int) -> bool:
        return self._state[block] is BlockState.CLEAN

    def _make_room(self, nbytes: int, in_use: Sequence[int]) -> None:
        while self._free_bytes < nbytes:
            candidates = self._resident.difference(self._static, in_use)
            victim = choose_victim(candidates, self._next_use, is_clean=self._is_clean)
            if victim is None:
                raise BudgetError(
                    f"one event uses more than the {self._capacity_bytes} bytes of memory that are left next to what "
                    "stays"
                )
            self._evict(victim)

    def _evict(self, block: int) -> None:
        if self._state[block] is BlockState.DIRTY:
            self._write(block)
        if self._state[block] in (BlockState.WRITING, BlockState.READING):
            self._settle(block)
        self._to(block, BlockState.ON_NVME)
        self._forget(block)

    def _hold(self, block: int) -> None:
        self._resident.add(block)
        self._free_bytes -= self._nbytes[block]

    def _forget(self, block: int) -> None:
        self._resident.discard(block)
        self._free_bytes += self._nbytes[block]

    def _read(self, block: int, *, urgent: bool) -> None:
        self._to(block, BlockState.READING)
        self._reading.add(block)
        self._read_bytes += self._disk_nbytes[block]
        self.disk.read(block, self._disk_nbytes[block], urgent=urgent)

    def _write(self, block: int) -> None:
        self._to(block, BlockState.WRITING)
        self._writing.add(block)
        self.ever_written.add(block)
        self._written_bytes += self._disk_nbytes[block]
        self.disk.write(block, self._disk_nbytes[block])

    def _settle(self, block: int) -> None:
        self.disk.wait_for(block)
        self._collect()

    def _collect(self) -> None:
        for block in self.disk.collect():
            self._to(block, BlockState.CLEAN)
            self._writing.discard(block)
            self._reading.discard(block)
            self._settled += 1
