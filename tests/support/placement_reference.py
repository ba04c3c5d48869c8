"""The placement worked out block by block, as it was before it worked by the column: what it is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from deepoffload.errors import PlacementError
from deepoffload.schedule.cost_model import (
    Bandwidths,
    BlockKind,
    Traffic,
    Workload,
    block_traffic,
    seconds_saved,
)
from deepoffload.schedule.nvme_room import within_nvme
from deepoffload.schedule.placement import BlockSpec, Placement, WorkingSet
from deepoffload.schedule.small import is_small
from deepoffload.schedule.spread import spread
from deepoffload.schedule.table import Row, human_bytes

__all__ = ["plan_placement"]

_KINDS = (BlockKind.WEIGHT, BlockKind.GRADIENT, BlockKind.STATE)


def plan_placement(blocks: Iterable[BlockSpec], **options: Any) -> Placement:
    """The same as that of :mod:`tests.support.placing`."""
    specs = tuple(blocks)
    return within_nvme(lambda frugal: _place(specs, frugal=frugal, **options), 0, 0, durable=False)


def _place(
    blocks: Iterable[BlockSpec],
    *,
    capacity_bytes: int,
    nvme_capacity_bytes: int | None,
    event_weight_bytes: int,
    bandwidths: Bandwidths,
    workload: Workload,
    num_parameters: int | None = None,
    ring_pieces: int = 16,
    keep: frozenset[int] = frozenset(),
    set_up_bytes: int = 0,
    frugal: bool = False,
) -> Placement:
    """The same as ``place_columns`` of :mod:`deepoffload.schedule.placement`."""
    problem = _Problem(blocks, event_weight_bytes, bandwidths, workload, num_parameters, keep, set_up_bytes)
    total_bytes = max(sum(block.nbytes for block in problem.blocks), set_up_bytes)
    if total_bytes <= capacity_bytes:
        everything = frozenset(block.id for block in problem.blocks)
        return problem.placement(everything, WorkingSet(), capacity_bytes, nvme_capacity_bytes)
    least_bytes = total_bytes if nvme_capacity_bytes is None else problem.minimum_bytes
    if nvme_capacity_bytes is None or capacity_bytes < least_bytes:
        paged = [block for block in problem.blocks if block.id not in keep]
        placement = problem.placement(keep, problem.window(paged, 2, False), capacity_bytes, nvme_capacity_bytes)
        raise PlacementError(_memory_message(placement, least_bytes, nvme_capacity_bytes is not None), least_bytes)
    chosen = problem.choose_frugally(capacity_bytes) if frugal else None
    resident, window = chosen or problem.choose(capacity_bytes, max(ring_pieces, 2))
    return problem.placement(resident, window, capacity_bytes, nvme_capacity_bytes)


def _memory_message(placement: Placement, least_bytes: int, has_nvme: bool) -> str:
    remedy = "Raise host_budget"
    capacity = f"{human_bytes(placement.capacity_bytes)} ({placement.capacity_bytes} bytes)"
    if not has_nvme:
        total_bytes = sum(block.nbytes for block in placement.blocks)
        what = "Weights, gradients and optimizer state are"
        if total_bytes < least_bytes:
            what = "While parameters take the type that they compute in, the model needs"
        return (
            f"{what} {human_bytes(least_bytes)} ({least_bytes} bytes), more than "
            f"the memory budget of {capacity}, and there is no NVMe to put the rest on. Set nvme_path. Or: "
            f"{remedy[0].lower()}{remedy[1:]} to at least {least_bytes} bytes.\n{placement.table()}"
        )
    return (
        f"The working set does not fit: a step needs at least {human_bytes(placement.minimum_bytes)} "
        f"({placement.minimum_bytes} bytes) of memory at once, but the budget is {capacity}. {remedy} to at least "
        f"{placement.minimum_bytes} bytes.\n{placement.table()}"
    )


class _Problem:
    """The blocks to place, with everything that does not depend on the budget worked out once."""

    def __init__(
        self,
        blocks: Iterable[BlockSpec],
        event_weight_bytes: int,
        bandwidths: Bandwidths,
        workload: Workload,
        num_parameters: int | None,
        keep: frozenset[int],
        set_up_bytes: int,
    ) -> None:
        self.blocks = tuple(blocks)
        self._keep = keep & {block.id for block in self.blocks}
        self._event_weight_bytes = event_weight_bytes
        self._bandwidths = bandwidths
        self._num_parameters = num_parameters
        self._training = workload.training
        if len({block.id for block in self.blocks}) != len(self.blocks):
            raise ValueError("block ids must be unique")
        trained = {block.unit for block in self.blocks if block.kind is not BlockKind.WEIGHT}
        # Models are of few sorts of blocks and of very many blocks: what one costs is worked out once a sort.
        self._per_byte = {
            (kind, updated): block_traffic(kind, 1, workload, updated=updated)
            for kind in _KINDS
            for updated in (False, True)
        }
        self._sort = {block.id: (block.kind, block.unit in trained) for block in self.blocks}
        prices = bandwidths.prices(self._traffic(self.blocks))
        worth = {sort: seconds_saved(traffic, prices) for sort, traffic in self._per_byte.items()}
        shares = {block.id: block.read_share for block in self.blocks}
        self._worth = {block: worth[sort] * shares[block] for block, sort in self._sort.items()}
        largest = max((block.nbytes for block in self.blocks), default=0)
        small = {block.id for block in self.blocks if not workload.training and is_small(block.nbytes, largest)}
        ranked: list[tuple[tuple[bool, float, int, int, float], BlockSpec]] = []
        for rank, kind in enumerate(_KINDS):
            of_kind = [block for block in self.blocks if block.kind is kind]
            for place, block in zip(spread(len(of_kind)), of_kind, strict=True):
                value = self._worth[block.id] * (2 if block.id in small else 1)
                size = 0 if workload.training else block.nbytes
                ranked.append(((block.id not in keep, -value, -size, rank, place), block))
        self._ranked = [block for _, block in sorted(ranked, key=lambda entry: entry[0])]
        self._prefix_bytes = list(accumulate((block.nbytes for block in self._ranked), initial=0))
        self._suffix_needs = _suffix_needs(self._ranked)
        working_bytes = min(
            self._prefix_bytes[count] + self._suffix_needs[count].window_bytes(2, False, event_weight_bytes)
            for count in range(len(self._keep), len(self._ranked) + 1)
        )
        self.minimum_bytes = max(working_bytes, set_up_bytes)

    def _traffic(self, blocks: Iterable[BlockSpec]) -> Traffic:
        """Of all of ``blocks``, when they are paged."""
        nbytes: Counter[tuple[BlockKind, bool]] = Counter()
        for block in blocks:
            nbytes[self._sort[block.id]] += round(block.nbytes * block.read_share)
        return Traffic(
            sum(self._per_byte[sort].read_bytes * count for sort, count in nbytes.items()),
            sum(self._per_byte[sort].written_bytes * count for sort, count in nbytes.items()),
        )

    def window(self, paged: Iterable[BlockSpec], ring_pieces: int, prefetches_weights: bool) -> WorkingSet:
        return _suffix_needs(tuple(paged))[0].window(ring_pieces, prefetches_weights, self._event_weight_bytes)

    def choose(self, capacity_bytes: int, ring_pieces: int) -> tuple[frozenset[int], WorkingSet]:
        """The resident blocks and the window: the largest window that fits, then the most valuable blocks that fit.

        Only a capacity of at least ``minimum_bytes`` may be given; then the last level has a solution.
        """
        levels = [(pieces, True) for pieces in range(ring_pieces, 1, -1)] + [(2, False)]
        for pieces, prefetches_weights in levels:
            count = self._largest_prefix(capacity_bytes, pieces, prefetches_weights)
            if count is not None:
                break
        else:
            raise ValueError(f"capacity_bytes {capacity_bytes} is below the minimum of {self.minimum_bytes}")
        resident = {block.id for block in self._ranked[:count]}
        if (pieces, prefetches_weights) == levels[0]:  # below that, memory to spare is more window
            window = self._suffix_needs[count].window(pieces, prefetches_weights, self._event_weight_bytes)
            free_bytes = capacity_bytes - window.nbytes - self._prefix_bytes[count]
            for block in self._ranked[count:]:  # smaller blocks of less worth, where the next in line is too large
                if block.nbytes <= free_bytes:
                    resident.add(block.id)
                    free_bytes -= block.nbytes
        paged = [block for block in self.blocks if block.id not in resident]
        return frozenset(resident), self.window(paged, pieces, prefetches_weights)

    def choose_frugally(self, capacity_bytes: int) -> tuple[frozenset[int], WorkingSet] | None:
        """The resident blocks, from the largest on, and the least window; None where no such choice fits."""
        ranked = sorted(self.blocks, key=lambda block: (block.id not in self._keep, -block.nbytes, block.id))
        for count in range(len(ranked), len(self._keep) - 1, -1):
            resident = ranked[:count]
            free_bytes = capacity_bytes - sum(block.nbytes for block in resident)
            free_bytes -= self.window(ranked[count:], 2, False).nbytes
            if free_bytes >= 0:
                for block in ranked[count:]:
                    if block.nbytes <= free_bytes:
                        resident.append(block)
                        free_bytes -= block.nbytes
                ids = frozenset(block.id for block in resident)
                return ids, self.window([block for block in self.blocks if block.id not in ids], 2, False)
        return None

    def _largest_prefix(self, capacity_bytes: int, pieces: int, prefetches_weights: bool) -> int | None:
        """How many of the most valuable blocks fit next to the window that the others then need."""
        best = None
        for count, kept_bytes in enumerate(self._prefix_bytes):
            if kept_bytes > capacity_bytes:
                break
            if count < len(self._keep):
                continue
            needed = self._suffix_needs[count].window_bytes(pieces, prefetches_weights, self._event_weight_bytes)
            if kept_bytes + needed <= capacity_bytes:
                best = count
        return best

    def placement(
        self, resident: frozenset[int], window: WorkingSet, capacity_bytes: int, nvme_capacity_bytes: int | None
    ) -> Placement:
        paged = [block for block in self.blocks if block.id not in resident]
        resident_bytes = sum(block.nbytes for block in self.blocks if block.id in resident)
        traffic = self._traffic(paged)
        dynamic_bytes = max(capacity_bytes - resident_bytes, 0)
        rows = [self._row(kind, resident) for kind in _KINDS]
        rows.append(_window_row(window, dynamic_bytes) if paged else Row("windows + ring", reason="not needed"))
        return Placement(
            blocks=self.blocks,
            resident=resident,
            paged=frozenset(block.id for block in paged),
            window=window,
            capacity_bytes=capacity_bytes,
            nvme_capacity_bytes=nvme_capacity_bytes,
            resident_bytes=resident_bytes,
            dynamic_bytes=dynamic_bytes,
            lookahead_bytes=dynamic_bytes
            + sum(block.nbytes for block in self.blocks if block.id in resident and block.kind is BlockKind.GRADIENT),
            reserve_bytes=min(dynamic_bytes // 4, 3 * window.gradient_bytes),
            nvme_bytes=sum(block.nbytes for block in paged if not block.backed),
            minimum_bytes=self.minimum_bytes,
            traffic=traffic,
            disk_seconds=self._bandwidths.seconds(traffic),
            bandwidths=self._bandwidths,
            num_parameters=self._num_parameters,
            rows=tuple(rows),
            training=self._training,
        )

    def _row(self, kind: BlockKind, resident: frozenset[int]) -> Row:
        every = [block for block in self.blocks if block.kind is kind]
        kept = [block for block in every if block.id in resident]
        paged = [block for block in every if block.id not in resident]
        moved = self._traffic(paged)
        if not every:
            reason = "none"
        elif all(block.id in self._keep for block in every):
            reason = "kept in memory, as configured"
        elif not paged:
            reason = "all fit" if len(resident) < len(self.blocks) else "everything fits"
        else:
            more_bytes = min(1 << 30, sum(block.nbytes for block in paged))
            saved_s = max(self._worth[block.id] for block in paged) * more_bytes
            per = "step" if self._training else "forward pass"
            free = [block for block in every if block.id not in self._keep]
            room = "no room" if len(paged) == len(free) else f"{len(paged)} of {len(free)} have no room"
            reason = f"{room}; {human_bytes(more_bytes)} more would save {saved_s:.2g} s per {per}"
        return Row(
            name=kind.value,
            host_bytes=sum(block.nbytes for block in kept),
            nvme_bytes=sum(block.nbytes for block in paged if not block.backed),
            source_bytes=sum(block.nbytes for block in paged if block.backed),
            resident_blocks=len(kept),
            num_blocks=len(every),
            read_bytes=moved.read_bytes,
            written_bytes=moved.written_bytes,
            reason=reason,
        )


def _window_row(window: WorkingSet, dynamic_bytes: int) -> Row:
    parts = []
    if window.weight_bytes:
        ahead = " and the next" if window.prefetches_weights else ""
        parts.append(f"{human_bytes(window.weight_bytes)} for the weights in use{ahead}")
    if window.gradient_bytes:
        parts.append(f"{human_bytes(window.gradient_bytes)} for gradients")
    if window.ring_bytes:
        pieces = f"{window.ring_pieces} state pieces" if window.ring_pieces > 1 else "1 state piece"
        parts.append(f"{human_bytes(window.ring_bytes)} for {pieces}")
    return Row("windows + ring", host_bytes=max(dynamic_bytes, window.nbytes), reason=", ".join(parts))


class _Needs(NamedTuple):
    """Totals over the blocks that are paged, from which their window follows."""

    weight_total_bytes: int = 0
    weight_max_bytes: int = 0
    streamed_max_bytes: int = 0
    gradient_max_bytes: int = 0
    state_total_bytes: int = 0
    state_max_bytes: int = 0

    def and_block(self, block: BlockSpec) -> _Needs:
        weights, weight, streamed, gradient, states, state = self
        size = block.nbytes
        if block.kind is BlockKind.WEIGHT:
            passing = size if block.read_share else 0
            return _Needs(weights + size, max(weight, size), max(streamed, passing), gradient, states, state)
        if block.kind is BlockKind.GRADIENT:
            return _Needs(weights, weight, streamed, max(gradient, size), states, state)
        return _Needs(weights, weight, streamed, gradient, states + size, max(state, size))

    def window_bytes(self, ring_pieces: int, prefetches_weights: bool, event_weight_bytes: int) -> int:
        """``window(...).nbytes``, which is asked for every number of blocks that could stay."""
        weights, weight, streamed, gradient, states, state = self
        needed = max(event_weight_bytes, weight)
        if prefetches_weights:
            needed = max(needed, max(event_weight_bytes, streamed) + streamed)
        return min(needed, weights) + gradient + min(ring_pieces * state, states)

    def window(self, ring_pieces: int, prefetches_weights: bool, event_weight_bytes: int) -> WorkingSet:
        weights = max(event_weight_bytes, self.weight_max_bytes)
        if prefetches_weights:
            weights = max(weights, max(event_weight_bytes, self.streamed_max_bytes) + self.streamed_max_bytes)
        ring_bytes = min(ring_pieces * self.state_max_bytes, self.state_total_bytes)
        return WorkingSet(
            weight_bytes=min(weights, self.weight_total_bytes),
            gradient_bytes=self.gradient_max_bytes,
            ring_bytes=ring_bytes,
            ring_pieces=-(-ring_bytes // self.state_max_bytes) if self.state_max_bytes else 0,
            prefetches_weights=prefetches_weights and self.weight_total_bytes > 0,
        )


def _suffix_needs(blocks: Sequence[BlockSpec]) -> list[_Needs]:
    """The needs of ``blocks[n:]`` for n from 0 to ``len(blocks)``."""
    needs = [_Needs()]
    for block in reversed(blocks):
        needs.append(needs[-1].and_block(block))
    return needs[::-1]
