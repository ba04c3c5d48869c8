"""Which blocks stay in memory: by seconds saved per byte, with a working set reserved for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepoffload.errors import PlacementError
from deepoffload.schedule.cost_model import (
    Bandwidths,
    BlockKind,
    StepOverlap,
    Traffic,
    Workload,
    block_traffic,
    seconds_saved,
)
from deepoffload.schedule.small import is_small
from deepoffload.schedule.spread import spread
from deepoffload.schedule.table import Row, Totals, human_bytes, render

__all__ = ["BlockColumns", "BlockSpec", "BlockKind", "Placement", "WorkingSet", "place_columns"]

Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.int64]

_KINDS = (BlockKind.WEIGHT, BlockKind.GRADIENT, BlockKind.STATE)
KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
"""How :class:`BlockColumns` writes kinds."""


@dataclass(frozen=True)
class BlockSpec:
    """A block to be placed. ``nbytes``: what it takes in memory and on NVMe, alignment included. ``unit``: the unit it
    belongs to; a unit without gradients is frozen, and its weights are never written. ``backed``: a file of somebody
    else has the bytes, so it takes nothing on NVMe. ``read_share``: the part of it that a use reads."""

    id: int
    name: str
    kind: BlockKind
    nbytes: int
    unit: int
    backed: bool = False
    read_share: float = 1.0


class BlockColumns(NamedTuple):
    """Blocks to be placed, by the column: what :class:`BlockSpec` says of each of them, but its name."""

    ids: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]
    nbytes: npt.NDArray[np.int64]
    units: npt.NDArray[np.int64]
    backed: Mask
    read_shares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, blocks: Iterable[BlockSpec]) -> BlockColumns:
        blocks = list(blocks)
        rows = [(block.id, KIND_NUMBERS[block.kind], block.nbytes, block.unit, block.backed) for block in blocks]
        ids, kinds, nbytes, units, backed = np.array(rows, np.int64).reshape(-1, 5).T
        shares = np.array([block.read_share for block in blocks])
        return cls(ids, kinds.astype(np.int8), nbytes, units, backed.astype(bool), shares)


@dataclass(frozen=True)
class WorkingSet:
    """Memory through which the blocks that are not resident pass.

    ``weight_bytes``: the largest set of weights that one event uses, and if there is room the largest other unit, too,
    so that one is fetched while the other is used. ``gradient_bytes``: the largest gradient block.
    ``ring_bytes``: ``ring_pieces`` of the largest state piece.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    ring_bytes: int = 0
    ring_pieces: int = 0
    prefetches_weights: bool = False

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.ring_bytes


@dataclass(frozen=True)
class Placement:
    """Where each block lives, and what a step is expected to move.

    ``resident``: blocks that never leave memory. ``paged``: the others, which share ``dynamic_bytes`` of memory (at
    least ``window.nbytes``). Those that no file of somebody else backs take ``nvme_bytes`` of NVMe.
    ``lookahead_bytes``: how far ahead to fetch (``plan_prefetch``): ``dynamic_bytes`` and the memory of resident
    gradients, which is free until they land.
    ``reserve_bytes``: room that prefetches leave for gradients that are still to land: of three units at most.
    ``minimum_bytes``: the smallest capacity with which this model runs.
    ``traffic``, ``disk_seconds``: expected per optimizer step, or per forward pass where nothing is trained
    (``training``).
    ``bandwidths``: of the disk that it was made for.
    ``step_overlap``, ``updates``: when updates run, and a line for people on that. ``accumulation``, ``activations``:
    such lines on the order of micro-batches (empty where a step has one), and on where activations are.
    """

    blocks: tuple[BlockSpec, ...]
    resident: frozenset[int]
    paged: frozenset[int]
    window: WorkingSet
    capacity_bytes: int
    nvme_capacity_bytes: int | None
    resident_bytes: int
    dynamic_bytes: int
    lookahead_bytes: int
    reserve_bytes: int
    nvme_bytes: int
    minimum_bytes: int
    traffic: Traffic
    disk_seconds: float
    bandwidths: Bandwidths
    num_parameters: int | None
    rows: tuple[Row, ...]
    training: bool = True
    step_overlap: StepOverlap = StepOverlap.DEFERRED
    updates: str = ""
    accumulation: str = ""
    activations: str = ""

    def table(self, host_ranks: int = 1) -> str:
        """What went where and why, as aligned text: with ``host_ranks`` ranks on a host, of each of them and of all."""
        budgets = (self.capacity_bytes, self.nvme_capacity_bytes, self.minimum_bytes)
        notes = {"updates": self.updates, "accumulation": self.accumulation, "activations": self.activations}
        totals = Totals(*budgets, self.disk_seconds, self.num_parameters, host_ranks, self.training, notes)
        return render(self.rows, totals)


def place_columns(
    columns: BlockColumns,
    specs: Callable[[], tuple[BlockSpec, ...]],
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
    """Place blocks in ``capacity_bytes`` of memory and ``nvme_capacity_bytes`` of NVMe (None: there is no path).

    specs: the blocks of ``columns``, made only where they are placed and not refused.
    event_weight_bytes: the largest set of weights that one event uses at once.
    ring_pieces: state pieces that should be in memory at a time; 2 are the least. (16 pieces of some 20 MiB are where
        more stopped helping on the disk the defaults were tuned on.)
    keep: blocks that have to stay in memory, because the configuration says so.
    set_up_bytes: what must be in memory at once before the first step; no capacity below that is accepted.
    frugal: as little on NVMe as there can be, at any cost: the least window, and the largest blocks stay. So it
        does not depend on measured rates.

    If everything fits, everything is resident and nothing is ever written. Otherwise the window is reserved first, as
    large as there is room for, and what is left goes to the blocks that save most seconds per byte. Equal worth:
    weights before gradients before state, then spread evenly over the order given. Raises ``PlacementError``, with the
    table, when the least window does not fit or NVMe is missing. Whether NVMe is large enough is asked later
    (:func:`deepoffload.schedule.nvme_room.within_nvme`).
    """
    problem = _Problem(columns, event_weight_bytes, bandwidths, workload, num_parameters, keep, set_up_bytes)
    total_bytes = max(problem.total_bytes, set_up_bytes)
    if total_bytes <= capacity_bytes:
        everything = frozenset(columns.ids.tolist())
        placement = problem.placement(everything, WorkingSet(), capacity_bytes, nvme_capacity_bytes)
        return replace(placement, blocks=specs())
    least_bytes = total_bytes if nvme_capacity_bytes is None else problem.minimum_bytes
    if nvme_capacity_bytes is None or capacity_bytes < least_bytes:
        placement = problem.placement(keep, problem.window(keep, 2, False), capacity_bytes, nvme_capacity_bytes)
        raise PlacementError(
            _memory_message(placement, problem.total_bytes, least_bytes, nvme_capacity_bytes is not None), least_bytes
        )
    chosen = problem.choose_frugally(capacity_bytes) if frugal else None
    resident, window = chosen or problem.choose(capacity_bytes, max(ring_pieces, 2))
    placement = problem.placement(resident, window, capacity_bytes, nvme_capacity_bytes)
    return replace(placement, blocks=specs())


def _memory_message(placement: Placement, total_bytes: int, least_bytes: int, has_nvme: bool) -> str:
    remedy = "Raise host_budget"
    capacity = f"{human_bytes(placement.capacity_bytes)} ({placement.capacity_bytes} bytes)"
    if not has_nvme:
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
        columns: BlockColumns,
        event_weight_bytes: int,
        bandwidths: Bandwidths,
        workload: Workload,
        num_parameters: int | None,
        keep: frozenset[int],
        set_up_bytes: int,
    ) -> None:
        self._ids, self._kind, self._nbytes, units, self._backed, shares = columns
        self._moved_bytes = np.rint(self._nbytes * shares).astype(np.int64)
        self._streamed = shares > 0
        ids = np.sort(self._ids)  # np.unique takes thirty times as long
        if (ids[1:] == ids[:-1]).any():
            raise ValueError("block ids must be unique")
        self.total_bytes = int(self._nbytes.sum())
        self._kept = self._among(keep)
        self._event_weight_bytes = event_weight_bytes
        self._bandwidths = bandwidths
        self._training = workload.training
        self._num_parameters = num_parameters
        # Plans are of up to some 100,000 blocks, and of few sorts of them: everything is done by the column.
        trained = np.isin(units, units[self._kind != KIND_NUMBERS[BlockKind.WEIGHT]])
        self._sort = 2 * self._kind.astype(np.int64) + trained
        self._per_byte = [
            block_traffic(kind, 1, workload, updated=bool(updated)) for kind in _KINDS for updated in (0, 1)
        ]
        everything = np.ones(len(self._ids), bool)
        prices = bandwidths.prices(self._traffic(everything))
        worth = np.array([seconds_saved(traffic, prices) for traffic in self._per_byte])
        self._worth = worth[self._sort] * shares
        ranked, size = self._worth.copy(), np.zeros_like(self._nbytes)
        if not workload.training and len(ranked):
            ranked[is_small(self._nbytes, self._nbytes.max())] *= 2  # a request costs more than its bytes
            size = self._nbytes  # the window is as large as the largest blocks that pass through it
        place = np.empty(len(self._ids))
        for number in range(len(_KINDS)):
            of_kind = self._kind == number
            place[of_kind] = spread(int(of_kind.sum()))
        self._order = np.lexsort((place, self._kind, -size, -ranked, ~self._kept))
        ranked_bytes = self._nbytes[self._order]
        self._prefix_bytes = np.concatenate(([0], np.cumsum(ranked_bytes)))
        self._suffix_needs = _Needs.of_suffixes(self._kind[self._order], ranked_bytes, self._streamed[self._order])
        needed = self._prefix_bytes + self._suffix_needs.window_bytes(2, False, event_weight_bytes)
        self.minimum_bytes = max(int(needed[int(self._kept.sum()) :].min()), set_up_bytes)

    def _among(self, ids: frozenset[int]) -> Mask:
        """Which blocks are among ``ids``."""
        return np.isin(self._ids, np.fromiter(ids, np.int64, len(ids)))

    def _traffic(self, which: Mask) -> Traffic:
        """Of all blocks of ``which``, when they are paged."""
        nbytes = [int(self._moved_bytes[which & (self._sort == sort)].sum()) for sort in range(len(self._per_byte))]
        pairs = list(zip(self._per_byte, nbytes, strict=True))
        return Traffic(
            sum(traffic.read_bytes * count for traffic, count in pairs),
            sum(traffic.written_bytes * count for traffic, count in pairs),
        )

    def window(self, resident: frozenset[int], ring_pieces: int, prefetches_weights: bool) -> WorkingSet:
        """What the blocks pass through that are not ``resident``."""
        paged = ~self._among(resident)
        needs = _Needs.of_suffixes(self._kind[paged], self._nbytes[paged], self._streamed[paged])
        return needs.window(0, ring_pieces, prefetches_weights, self._event_weight_bytes)

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
        resident = frozenset(self._ids[self._order][:count].tolist())
        if (pieces, prefetches_weights) == levels[0]:  # below that, memory to spare is more window
            window = self._suffix_needs.window(count, pieces, prefetches_weights, self._event_weight_bytes)
            free_bytes = capacity_bytes - window.nbytes - int(self._prefix_bytes[count])
            resident = self._filled(self._order, count, free_bytes)
        return resident, self.window(resident, pieces, prefetches_weights)

    def choose_frugally(self, capacity_bytes: int) -> tuple[frozenset[int], WorkingSet] | None:
        """The resident blocks, from the largest on, and the least window; None where no such choice fits."""
        order = np.lexsort((self._ids, -self._nbytes, ~self._kept))
        ranked_bytes = self._nbytes[order]
        prefix_bytes = np.concatenate(([0], np.cumsum(ranked_bytes)))
        needs = _Needs.of_suffixes(self._kind[order], ranked_bytes, self._streamed[order])
        windows = needs.window_bytes(2, False, self._event_weight_bytes)
        free_bytes = capacity_bytes - prefix_bytes - windows
        fits = np.flatnonzero(free_bytes >= 0)
        if not len(fits) or fits[-1] < int(self._kept.sum()):
            return None
        resident = self._filled(order, int(fits[-1]), int(free_bytes[fits[-1]]))
        return resident, self.window(resident, 2, False)

    def _filled(self, order: npt.NDArray[np.int64], count: int, free_bytes: int) -> frozenset[int]:
        """The first ``count`` blocks of ``order``, and smaller ones behind them where the next in line is too large."""
        ids, sizes = self._ids[order], self._nbytes[order]
        resident = set(ids[:count].tolist())
        small = count + np.flatnonzero(sizes[count:] <= free_bytes)
        for block, nbytes in zip(ids[small].tolist(), sizes[small].tolist(), strict=True):
            if nbytes <= free_bytes:
                resident.add(block)
                free_bytes -= nbytes
        return frozenset(resident)

    def _largest_prefix(self, capacity_bytes: int, pieces: int, prefetches_weights: bool) -> int | None:
        """How many of the most valuable blocks fit next to the window that the others then need."""
        needed = self._suffix_needs.window_bytes(pieces, prefetches_weights, self._event_weight_bytes)
        fits = np.flatnonzero(self._prefix_bytes + needed <= capacity_bytes)
        return int(fits[-1]) if len(fits) and fits[-1] >= int(self._kept.sum()) else None

    def placement(
        self, resident: frozenset[int], window: WorkingSet, capacity_bytes: int, nvme_capacity_bytes: int | None
    ) -> Placement:
        stays = self._among(resident)
        resident_bytes = int(self._nbytes[stays].sum())
        traffic = self._traffic(~stays)
        dynamic_bytes = max(capacity_bytes - resident_bytes, 0)
        rows = [self._row(number, stays) for number in range(len(_KINDS))]
        rows.append(
            _window_row(window, dynamic_bytes) if not stays.all() else Row("windows + ring", reason="not needed")
        )
        return Placement(
            blocks=(),
            resident=resident,
            paged=frozenset(self._ids[~stays].tolist()),
            window=window,
            capacity_bytes=capacity_bytes,
            nvme_capacity_bytes=nvme_capacity_bytes,
            resident_bytes=resident_bytes,
            dynamic_bytes=dynamic_bytes,
            lookahead_bytes=dynamic_bytes
            + int(self._nbytes[stays & (self._kind == _KINDS.index(BlockKind.GRADIENT))].sum()),
            reserve_bytes=min(dynamic_bytes // 4, 3 * window.gradient_bytes),
            nvme_bytes=int(self._nbytes[~stays & ~self._backed].sum()),
            minimum_bytes=self.minimum_bytes,
            traffic=traffic,
            disk_seconds=self._bandwidths.seconds(traffic),
            bandwidths=self._bandwidths,
            num_parameters=self._num_parameters,
            rows=tuple(rows),
            training=self._training,
        )

    def _row(self, number: int, stays: Mask) -> Row:
        every = self._kind == number
        kept, paged, free = every & stays, every & ~stays, every & ~self._kept
        moved = self._traffic(paged)
        num_paged, num_free = int(paged.sum()), int(free.sum())
        if not every.any():
            reason = "none"
        elif not num_free:
            reason = "kept in memory, as configured"
        elif not num_paged:
            reason = "all fit" if not stays.all() else "everything fits"
        else:
            more_bytes = min(1 << 30, int(self._nbytes[paged].sum()))
            room = "no room" if num_paged == num_free else f"{num_paged} of {num_free} have no room"
            saved = f"{self._worth[paged].max() * more_bytes:.2g} s per {'step' if self._training else 'forward pass'}"
            reason = f"{room}; {human_bytes(more_bytes)} more would save {saved}"
        return Row(
            name=_KINDS[number].value,
            host_bytes=int(self._nbytes[kept].sum()),
            nvme_bytes=int(self._nbytes[paged & ~self._backed].sum()),
            source_bytes=int(self._nbytes[paged & self._backed].sum()),
            resident_blocks=int(kept.sum()),
            num_blocks=int(every.sum()),
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
    """Totals over the blocks that are paged, from which their window follows: an entry for each number n of blocks
    that stay, over those from the n-th on."""

    weight_total_bytes: Bytes
    weight_max_bytes: Bytes
    streamed_max_bytes: Bytes
    gradient_max_bytes: Bytes
    state_total_bytes: Bytes
    state_max_bytes: Bytes

    @classmethod
    def of_suffixes(cls, kinds: npt.NDArray[np.int8], nbytes: Bytes, streamed: Mask) -> _Needs:
        """Of blocks in an order, ``kinds`` by number and ``nbytes``: of all, without the first, and so on. A step reads
        those that are ``streamed`` ahead, and of the others rows."""
        weights, *others = (kinds == number for number in range(len(_KINDS)))
        weight, ahead, gradient, state = (
            np.concatenate((np.where(which, nbytes, 0), [0]))[::-1] for which in (weights, weights & streamed, *others)
        )
        return cls(
            np.cumsum(weight)[::-1],
            np.maximum.accumulate(weight)[::-1],
            np.maximum.accumulate(ahead)[::-1],
            np.maximum.accumulate(gradient)[::-1],
            np.cumsum(state)[::-1],
            np.maximum.accumulate(state)[::-1],
        )

    def _weight_bytes(self, prefetches_weights: bool, event_bytes: int) -> Bytes:
        needed, ahead = np.maximum(event_bytes, self.weight_max_bytes), self.streamed_max_bytes
        if prefetches_weights:
            needed = np.maximum(needed, np.maximum(event_bytes, ahead) + ahead)
        return np.minimum(needed, self.weight_total_bytes)

    def window_bytes(self, ring_pieces: int, prefetches_weights: bool, event_weight_bytes: int) -> Bytes:
        """``window(...).nbytes`` for each number of blocks that stay."""
        ring_bytes = np.minimum(ring_pieces * self.state_max_bytes, self.state_total_bytes)
        return self._weight_bytes(prefetches_weights, event_weight_bytes) + self.gradient_max_bytes + ring_bytes

    def window(self, count: int, ring_pieces: int, prefetches_weights: bool, event_weight_bytes: int) -> WorkingSet:
        """Where the first ``count`` blocks stay."""
        weights, _, _, gradient, states, state = (int(column[count]) for column in self)
        ring_bytes = min(ring_pieces * state, states)
        return WorkingSet(
            weight_bytes=int(self._weight_bytes(prefetches_weights, event_weight_bytes)[count]),
            gradient_bytes=gradient,
            ring_bytes=ring_bytes,
            ring_pieces=-(-ring_bytes // state) if state else 0,
            prefetches_weights=prefetches_weights and weights > 0,
        )
