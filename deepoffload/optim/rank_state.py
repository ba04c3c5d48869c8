"""Optimizer state with several ranks: each keeps its runs of every array, and gives them to ranks that ask.

A state dict shows whole arrays. Who reads one gathers it, a chunk of every rank's run at a time. The other ranks give
theirs also while their programs do something else. So one rank may read alone, and all may read at once. A rank's
pieces may have been laid out otherwise than another's: what is gathered is the values, in fp32, not the pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.copies.payload_numbers import FIRST_STATE_NUMBER
from deepoffload.copies.rank_device import Coming, GatherFlight
from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import UsageError
from deepoffload.native import cpu_adam
from deepoffload.optim.paged_state import ArrayCopy, Arrays, copy_own_master, is_own_master, resident_piece
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS, PieceView
from deepoffload.optim.threads import num_threads
from deepoffload.params.edits import look_for_edits
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.shards import OwnedRun
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.collectives import as_bytes

FIELDS = ("", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""What can be gathered: "" completes the weight to its fp32 master; the others are the fields of pieces."""

CHUNK_NUMEL = 1 << 20
"""So many elements of each rank's run are gathered at a time: 4 MiB of each. No block of 8-bit state is cut."""

_FIELD_BITS, _TENSOR_BITS, _CHUNK_BITS = 4, 16, 24


class StatePart(NamedTuple):
    """What one gather brings.

    Attributes:
        unit: its index.
        tensor: the number of the parameter among the unit's.
        field: the number in ``FIELDS``.
        chunk: of each rank's run.
    """

    unit: int
    tensor: int
    field: int
    chunk: int

    @property
    def number(self) -> int:
        """By which the ranks agree on it."""
        packed = self.unit << _TENSOR_BITS | self.tensor
        return FIRST_STATE_NUMBER | (packed << _FIELD_BITS | self.field) << _CHUNK_BITS | self.chunk

    @classmethod
    def of(cls, number: int) -> StatePart:
        """The part with a number."""
        left, chunk = divmod(number ^ FIRST_STATE_NUMBER, 1 << _CHUNK_BITS)
        left, field = divmod(left, 1 << _FIELD_BITS)
        unit, tensor = divmod(left, 1 << _TENSOR_BITS)
        return cls(unit, tensor, field, chunk)


class RankState:
    """The state of one pager's parameters, of which this rank keeps its runs."""

    def __init__(self, pager: Pager, link: RankLink) -> None:
        self._pager = pager
        self._link = link
        self._asked: dict[int, deque[Coming]] = {}
        self._given: deque[GatherFlight] = deque()
        link.state = self
        link.before_meeting.append(self._let_go)

    def meet(self, what: str) -> None:
        """Return when all ranks are at ``what``: before state changes that another rank may still read, or after.

        Raises:
            RankError: another rank has gone or failed, or does not come.
        """
        self._link.notices.meet(what)

    # -- what this rank reads --------------------------------------------------------------------------------------

    def arrays(
        self, found: Set[ParamHandle], held: Mapping[ParamHandle, Arrays]
    ) -> Iterator[tuple[ParamHandle, dict[str, str]]]:
        """The arrays that the pieces of all ranks hold of each parameter, and what completes its weight: the fields by
        their keys."""
        for handle in found:
            present = dict(held.get(handle, {}))
            lead = _lead(handle)
            if lead == "remainder" or (lead == "master" and not handle.master_stale):
                present[lead] = ""
            yield handle, present

    def copy_arrays(self, handle: ParamHandle, copies: Mapping[str, ArrayCopy]) -> None:
        """As ``paged_state.copy_arrays``, of all ranks' runs.

        Raises:
            RankError: another rank has gone or failed.
        """
        threads = num_threads()
        with self._pager.lock:
            if handle.unit is not None:
                look_for_edits([handle.unit])
            for key, copy in copies.items():
                if not copy.field and handle.master_stale:
                    copy_own_master(handle, key, copy.target)
                    continue
                itemsize = copy.target.element_size()
                for start, values in self._runs(handle, copy.field):
                    address = copy.target.data_ptr() + start * itemsize
                    cpu_adam.copy(address, values.data_ptr(), values.nbytes, threads)

    def with_own_master(self, handles: Set[ParamHandle]) -> set[ParamHandle]:
        """As ``paged_state.with_own_master``, of all ranks' runs. Every rank finds the same."""
        found = set()
        with self._pager.lock:
            for handle in handles:
                lead = _lead(handle)
                if lead is None or not has_state(handle):
                    continue
                assert handle.unit is not None
                look_for_edits([handle.unit])
                if not handle.master_stale and any(is_own_master(lead, run) for _, run in self._runs(handle, "")):
                    found.add(handle)
        return found

    def _runs(self, handle: ParamHandle, field: str) -> Iterator[tuple[int, Tensor]]:
        """All elements of an array, from all ranks: runs of it, each with the number of its first element. A run is
        valid until the next one."""
        unit, tensor = _place(handle)
        owned = _owned(unit, tensor)
        chunks = -(-max((run.numel for _, run in owned), default=0) // CHUNK_NUMEL)
        for chunk in range(chunks):
            part = StatePart(unit.index, tensor, FIELDS.index(field), chunk)
            whole = self._gather(part, handle, owned)
            for rank, run in owned:
                numel = min(run.numel - chunk * CHUNK_NUMEL, whole.shape[1])
                if numel > 0:
                    yield run.start + chunk * CHUNK_NUMEL, whole[rank, :numel]

    def _gather(self, part: StatePart, handle: ParamHandle, owned: list[tuple[int, OwnedRun]]) -> Tensor:
        """One chunk of each rank's run: ``(ranks, elements)``."""
        numel, dtype = _chunk_numel(part, owned), _dtype(handle, FIELDS[part.field])
        with outside_user_modes():
            whole = torch.empty(self._link.ranks.world_size, numel, dtype=dtype, device="cpu")
            coming = Coming(self._link, part.number, as_bytes(whole.view(-1)))
            self._asked.setdefault(part.number, deque()).append(coming)
            self._link.post_gather(part.number)
            coming.await_served()
        return whole

    # -- what this rank gives --------------------------------------------------------------------------------------

    def serve(self, number: int, takers: tuple[int, ...]) -> GatherFlight:
        """Launch a gather, as all ranks do now."""
        self._let_go()
        part = StatePart.of(number)
        unit = next(unit for unit in self._pager.units if unit.index == part.unit)
        handle = unit.handles[part.tensor]
        self._pager.catch_up(unit)
        with outside_user_modes():
            numel = _chunk_numel(part, _owned(unit, part.tensor))
            values = torch.zeros(numel, dtype=_dtype(handle, FIELDS[part.field]), device="cpu")
            self._copy_own(part, handle, values)
            coming = self._asked_first(number) if self._link.ranks.rank in takers else None
            whole = None if coming is None else coming.whole
            transfer = self._link.exchange.gather(as_bytes(values), whole, self.name(number), takers)
        flight = GatherFlight([transfer], _nothing if coming is None else coming.has_arrived)
        if coming is not None:
            coming.flight = flight
        self._given.append(flight)
        return flight

    def name(self, number: int) -> str:
        """What errors call a part."""
        part = StatePart.of(number)
        unit = next((unit for unit in self._pager.units if unit.index == part.unit), None)
        what = FIELDS[part.field] or "the master"
        return f"state {number}" if unit is None else f"{what} of {unit.handles[part.tensor].name}"

    def _asked_first(self, number: int) -> Coming:
        asked = self._asked[number]
        coming = asked.popleft()
        if not asked:
            del self._asked[number]
        return coming

    def _copy_own(self, part: StatePart, handle: ParamHandle, target: Tensor) -> None:
        """Put this rank's chunk at the beginning of ``target``."""
        unit, field = _place(handle)[0], FIELDS[part.field]
        assert unit.layout is not None
        run = unit.layout.run_of(unit.rank, part.tensor)
        begin = 0 if run is None else run.start + part.chunk * CHUNK_NUMEL
        end = 0 if run is None else min(run.start + run.numel, begin + CHUNK_NUMEL)
        copied = 0
        for piece in unit.pieces:
            for held in piece.layout.segments:
                first, last = max(begin, held.start), min(end, held.start + held.numel)
                if piece.handles[held.tensor] is not handle or first >= last:
                    continue
                if field and field not in piece.format.fields:
                    continue
                segment = PieceSegment(held.tensor, first, last - first, held.piece_start + first - held.start)
                with resident_piece(self._pager, piece):
                    view = PieceView(self._pager.tiers, piece)
                    address = target.data_ptr() + (first - begin) * target.element_size()
                    if field:
                        view.load_fp32(field, segment, address)
                    else:
                        values = view.stored_lead(segment)
                        cpu_adam.copy(address, values.data_ptr(), values.nbytes, num_threads())
                copied += last - first
        if copied < end - begin:
            raise UsageError(f"{field} of {handle.name}: the optimizer does not keep this array any more")

    def _let_go(self) -> None:
        """Of what the other ranks have read."""
        with self._link.rounds.judged():
            while self._given and self._given[0].releasable():
                self._given.popleft().release()


def has_state(handle: ParamHandle) -> bool:
    """Whether pieces hold state of a parameter, perhaps those of other ranks alone."""
    unit = handle.unit
    if unit is None:
        return False
    if handle.cut is None:
        return any(handle in piece.handles for piece in unit.pieces)
    gradients = handle.pager.gradients
    return gradients is not None and gradients.is_tracked(handle)


def _place(handle: ParamHandle) -> tuple[Unit, int]:
    unit = handle.unit
    if unit is None or unit.layout is None:
        raise RuntimeError(f"{handle.name} is not cut for several ranks")
    return unit, unit.handles.index(handle)


def _owned(unit: Unit, tensor: int) -> list[tuple[int, OwnedRun]]:
    """Who owns anything of a parameter, and which run of it."""
    assert unit.layout is not None
    runs = ((rank, unit.layout.run_of(rank, tensor)) for rank in range(unit.layout.world_size))
    return [(rank, run) for rank, run in runs if run is not None]


def _chunk_numel(part: StatePart, owned: list[tuple[int, OwnedRun]]) -> int:
    """Elements that each rank gives, also where its run has fewer."""
    return min(CHUNK_NUMEL, max(run.numel for _, run in owned) - part.chunk * CHUNK_NUMEL)


def _lead(handle: ParamHandle) -> str | None:
    return MASTER_PART_KEYS.get(LAYOUTS[handle.dtype]) if handle.dtype in LAYOUTS else None


def _dtype(handle: ParamHandle, field: str) -> torch.dtype:
    return torch.int16 if not field and _lead(handle) == "remainder" else torch.float32


def _nothing() -> None:
    """A gather has come of which this rank takes nothing."""
