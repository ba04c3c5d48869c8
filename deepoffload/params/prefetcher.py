"""The prefetcher: has the planner decide what moves between NVMe and host memory, and has the tier manager move it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sized

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.planner import MoveKind, plan_prefetch, plan_write_back
from deepoffload.schedule.trace import Trace
from deepoffload.schedule.victims import choose_victim

WRITE_BEHIND_SHARE = 0.5
"""At most this share of the arena may be in flight to NVMe without anybody waiting for it."""

BRIEF_SHARE = 0.5
"""At most this share of the memory for what comes and goes is held by blocks that will be gone at the end of the step,
so that they are not written."""

EXTRA_VICTIMS_MAX = 3
"""How many blocks leave for a prefetch beyond those that make room enough, when that room is in pieces."""

BUSY_TRANSFERS = 3
"""Blocks on their way to or from NVMe that keep the disk busy until the next event or two."""

EVENTS_PER_PLAN = 3
"""How many events may pass without a plan while the disk has enough to do in both directions."""


class _LeftAlone:
    """The blocks that stay in memory for good, and are there, and those that are not to come ahead."""

    def __init__(self, tiers: TierManager, not_ahead: Container[int]) -> None:
        self._tiers = tiers
        self._not_ahead = not_ahead

    def __contains__(self, block: object) -> bool:
        return block in self._not_ahead or (block in self._tiers.static and not self._tiers.is_away(block))


class Prefetcher:
    """Called at every event of the program, under the memory's lock.

    Args:
        next_use: events until a block is used again.
        units: of the models; how many there are says what counts as far in the future.
        not_ahead: blocks that are not fetched ahead. Those that stay in memory for good are then, too, while they are
            away. (With None they come when they are first used, and give up their extents then.)
    """

    def __init__(
        self,
        tiers: TierManager,
        trace: Trace,
        next_use: Callable[[int], float],
        units: Sized,
        *,
        not_ahead: Container[int] | None = None,
    ) -> None:
        self._lookahead_bytes = tiers.arena.capacity_bytes
        self._reserve_bytes = 0
        self._granule_bytes = PAGE_BYTES
        self._tiers = tiers
        self._trace = trace
        self._next_use = next_use
        self._units = units
        self._static: Container[int] = tiers.static if not_ahead is None else _LeftAlone(tiers, not_ahead)
        self._unplanned = 0
        self._stuck_at: tuple[int, int] | None = None

    def placed(self, placement: Placement) -> None:
        """The models have their placement: plans reach as far ahead as it says, leave the room that it says, and use
        holes in whole parts of the room that most blocks take that come and go."""
        self._lookahead_bytes = placement.lookahead_bytes
        self._reserve_bytes = placement.reserve_bytes
        self._granule_bytes = self._tiers.common_room_bytes(placement.resident)

    def end_of_step(self) -> None:
        """Splinters between blocks that stay are worth moving these once."""
        self._tiers.merge_holes(self._granule_bytes)

    def pump(self, in_use: set[int] | frozenset[int]) -> None:
        """Collect what completed, write behind, fetch ahead. ``in_use``: the blocks of the running event."""
        tiers = self._tiers
        tiers.poll()
        if self._may_wait():
            return
        self._write_behind(in_use)
        away = tiers.is_away
        moves = plan_prefetch(
            self._trace.upcoming(),
            is_resident=lambda b: not away(b),
            nbytes=tiers.room_bytes,
            free_bytes=tiers.arena.whole_bytes(self._granule_bytes),
            evictable=self._evictable(in_use),
            next_use=self._next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=self._static,
            is_empty=tiers.is_empty,
            reserve_bytes=self._reserve_bytes,
            aside_bytes=sum(tiers.room_bytes(b) for b in in_use if tiers.is_empty(b) or tiers.is_away(b)),
        )
        for move in moves:
            block = tiers.block(move.block)
            done = tiers.evict(block) if move.kind is MoveKind.EVICT else self._fetch_ahead(block, in_use)
            if not done:
                break
        self._stuck_at = None if moves else (tiers.transfers.settled, tiers.arena.used_bytes)

    def _may_wait(self) -> bool:
        """Whether the plan can be left to the next event or the one after it: the program is where it was expected to
        be, and either there is enough on its way in both directions or nothing has changed since no room was found."""
        tiers, transfers = self._tiers, self._tiers.transfers
        self._unplanned += 1
        if self._unplanned < EVENTS_PER_PLAN and tiers.policy.predicted:
            if transfers.are_many(BUSY_TRANSFERS) or self._stuck_at == (transfers.settled, tiers.arena.used_bytes):
                return True
        self._unplanned = 0
        return False

    def _evictable(self, in_use: set[int] | frozenset[int]) -> Iterator[int]:
        """Blocks whose memory a prefetch may take now."""
        for block in self._tiers.passing(BlockState.CLEAN):
            if block.id not in in_use and self._tiers.evictable(block):
                yield block.id

    def _fetch_ahead(self, block: Block, in_use: set[int] | frozenset[int]) -> bool:
        """Start reading a block for which there is memory enough. When that lies in pieces, what is used last leaves;
        sliding blocks together costs the program's time, so that comes after."""
        tiers = self._tiers
        for _ in range(EXTRA_VICTIMS_MAX):
            if tiers.prefetch(block):
                return True
            victim = choose_victim(
                self._evictable(in_use),
                self._next_use,
                farther_than=self._next_use(block.id) + len(self._units),
            )
            if victim is None or not tiers.evict(tiers.block(victim)):
                break
        return tiers.prefetch(block, compact=True)

    def _to_write(self, dirty: list[Block]) -> list[int]:
        """Without the brief ones, as far as these may stay: the newest, which have the rest of the step before them."""
        left_bytes = BRIEF_SHARE * self._lookahead_bytes
        staying: set[int] = set()
        for block in reversed(dirty):
            if block.is_brief and block.room_bytes <= left_bytes:
                left_bytes -= block.room_bytes
                staying.add(block.id)
        return [block.id for block in dirty if block.id not in staying]

    def _write_behind(self, in_use: set[int] | frozenset[int]) -> None:
        """Start writing dirty blocks that nobody uses and that will have to leave."""
        tiers = self._tiers
        dirty = self._to_write([block for block in tiers.passing(BlockState.DIRTY) if block.id not in in_use])
        budget = tiers.arena.capacity_bytes * WRITE_BEHIND_SHARE - tiers.in_flight_bytes(BlockState.WRITING)
        if not dirty or budget <= 0:
            return
        chosen = plan_write_back(
            dirty,
            self._trace.upcoming(),
            nbytes=tiers.room_bytes,
            next_use=self._next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=tiers.static,
        )
        for block_id in chosen:
            block = tiers.block(block_id)
            if budget >= block.nbytes and tiers.write_behind(block):
                budget -= block.nbytes
