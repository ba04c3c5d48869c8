"""The host update, unit by unit and piece by piece: load the state, one native pass, mark for writing.

A step either runs at once (``step_overlap="none"``, the serial reference) or is *deferred*: each unit is caught up
right before its next use, so that the transfers of its state overlap with everything else. The arithmetic of a piece
knows nothing of when it runs; so the bits are the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import Elsewhere, Segment, StateLayout
from deepoffload.optim.device_kernels import DeviceKernels
from deepoffload.optim.device_update import run_piece, updates_on_device
from deepoffload.optim.gradients import NATIVE_DTYPES, Gradients
from deepoffload.optim.relayout import fit_pieces
from deepoffload.optim.rule import Hyper, Rule, UpdateJob
from deepoffload.optim.state import MASTER_PART_KEYS, PieceView, ensure_pieces, follow_weight, ranges_of
from deepoffload.optim.threads import num_threads
from deepoffload.params.edits import look_for_edits
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import get_grad
from deepoffload.params.unit import ParamHandle, StateFormat, StatePiece, Unit
from deepoffload.timeline import Lane

_BARE = StateLayout.FP32
"""Nothing completes the weights of such a piece."""


class Change(Protocol):
    """How blocks change: in place (:class:`InPlace`), or so that the change can be undone
    (:class:`~deepoffload.memory.kept_bytes.KeptBytes`)."""

    def will_change(self, block: Block) -> None: ...

    def will_write(self, ranges: Iterable[tuple[int, int]]) -> None: ...

    def elsewhere(self) -> Sequence[Elsewhere]: ...

    def wrote(self, ranges: Iterable[tuple[int, int]]) -> None: ...

    def changed(self, block: Block) -> None: ...


class InPlace:
    """A change for good."""

    def __init__(self, tiers: TierManager) -> None:
        self.will_change = tiers.will_change

    def will_write(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nobody asks."""

    def elsewhere(self) -> tuple[()]:
        """Nothing is read in another place."""
        return ()

    def wrote(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Nobody asks."""

    def changed(self, block: Block) -> None:
        """It has changed where it is."""


class HostUpdate:
    """One step of an update rule over the paged parameters of one pager.

    Precondition: no unit has a pending update. It tracks which pieces remain, so an update that fails (a transfer) or
    is interrupted resumes at the piece where it stopped. Finished pieces are not touched again. [Note: deferred
    updates] in ``params.pager`` says when it is applied.

    Args:
        units: of these alone; of all units of the pager when not given.
    """

    is_guess = False
    uses_gradients = True

    def __init__(
        self,
        pager: Pager,
        gradients: Gradients,
        rule: Rule,
        jobs: Mapping[ParamHandle, UpdateJob],
        grad_factor: float,
        units: Iterable[Unit] | None = None,
    ) -> None:
        self.pager = pager
        self.tiers = pager.tiers
        self.memory = pager.memory
        self.gradients = gradients
        self.rule = rule
        self.jobs = jobs
        self.grad_factor = grad_factor
        self._left: dict[int, list[int]] = {}
        for handle in jobs:
            ensure_pieces(self.tiers, handle)
        units = pager.units if units is None else units
        self._units = [unit for unit in units if any(handle in jobs for handle in unit.handles)]

    def take_edits(self) -> None:
        """Let what the program has written into the weights land in the masters first, where no door has seen it. To
        be called before the step counts: it may have to fetch weights, and raises what that raises."""
        with self.pager.lock:
            for unit in self._units:
                if not unit.owner.installed and any(handle.given() for handle in unit.handles):
                    self.memory.acquire(unit.weights)
                    try:
                        unit.owner.install()
                    finally:
                        self.memory.release(unit.weights)
                look_for_edits([unit])

    def hand_over(self) -> None:
        """From here on every unit of a parameter in ``jobs`` has this update to make. To be called under the pager's
        lock, when none has another one to make. Moves nothing."""
        for unit in self._units:
            if unit.pending is not None:
                raise RuntimeError(f"{unit.name} still has another update to make")
        for unit in self._units:
            unit.pending = self
        for handle in self.jobs:
            handle.count_update()

    def run(self, *, defer: bool) -> None:
        """Update every parameter in ``jobs`` from its gradient times ``grad_factor``: now, or when its unit is used
        next.

        A unit whose weights or gradients the program has views of is never deferred: it would see old values through
        them. So would a thread that is using them right now. The weights of the others are not shown until
        then, for what comes to them past the doors. No unit is deferred where everything stays in memory: there is
        nothing to overlap with then. Raises what the transfers raise; :meth:`Pager.catch_up_all` resumes with the
        rest then.
        """
        with self.pager.lock:
            defer = defer and not self.pager.updates_hide_nothing()
            for unit in self._units:
                if unit.pending is not self:
                    continue
                in_use = self.is_watched(unit) or self.memory.is_used_elsewhere(unit.weights)
                if not defer or self._left.get(unit.index) == [] or in_use:
                    self.pager.catch_up(unit)
                else:
                    unit.owner.release()

    def made(self, unit: Unit, pieces: Collection[int]) -> None:
        """These pieces of a unit have been updated already, from the same gradients and with the same factor."""
        self._left[unit.index] = [n for n, piece in enumerate(unit.pieces) if self._jobs_of(piece) and n not in pieces]

    def make_pieces(self, unit: Unit, pieces: Iterable[int], change: Change) -> None:
        """Update some pieces of a unit, and nothing else: the step may not be made. What ``change`` raises comes out of
        here, and so does what transfers raise."""
        with self.pager.lock:
            self._apply_on_host(unit, list(pieces), change)

    def needs(self, handle: ParamHandle) -> bool:
        """Whether the gradient of ``handle`` is still to be used."""
        return handle in self.jobs

    def blocks_to_change(self, unit: Unit) -> list[Block] | None:
        """What is left of a unit's update will change these blocks, and nothing else of what the unit consists of. None
        when it will do more: a first update makes state, one after an edit makes masters."""
        mine = {handle: self.jobs[handle] for handle in unit.handles if handle in self.jobs}
        if any(handle.master_stale or (job.first and job.arrays) for handle, job in mine.items()):
            return None
        left = self._left.get(unit.index)
        blocks = [unit.weights]
        for number, piece in enumerate(unit.pieces):
            jobs = self._jobs_of(piece)
            if not jobs or not self._is_stateful(piece) or (left is not None and number not in left):
                continue
            wanted = {
                StateFormat(job.fields, job.state_dtype, job.whole)
                for job in jobs
                if job.arrays or piece.kind is not _BARE
            }
            if wanted - {piece.format} or not self.tiers.has_bytes(piece.block):
                return None
            blocks.append(piece.block)
        return blocks

    def _is_stateful(self, piece: StatePiece) -> bool:
        """SGD without momentum on fp32 weights has no state: its pieces stay where they are."""
        return piece.kind is not _BARE or any(job.arrays for job in self._jobs_of(piece))

    def is_watched(self, unit: Unit) -> bool:
        """Whether the program has views of a unit's weights or gradients, or holds a gradient itself."""
        mine = (handle for handle in unit.handles if handle in self.jobs)
        return not unit.owner.can_release() or self.gradients.is_watched(mine)

    def _jobs_of(self, piece: StatePiece) -> list[UpdateJob]:
        handles = (piece.handles[segment.tensor] for segment in piece.layout.segments)
        return [self.jobs[handle] for handle in handles if handle in self.jobs]

    def apply(self, unit: Unit) -> None:
        """Update what is left of a unit. To be called through :meth:`Pager.catch_up`, under its lock."""
        left = self._left.get(unit.index)
        if left is None:
            fit_pieces(self.tiers, unit, self.jobs)
            left = self._left[unit.index] = [n for n, piece in enumerate(unit.pieces) if self._jobs_of(piece)]
        if self._state_is_shown(unit, left):
            self._apply_where_shown(unit, left)
        else:
            self._apply_on_host(unit, left, InPlace(self.tiers))
        self._finished(unit)

    def _finished(self, unit: Unit) -> None:
        """All of a unit is updated."""
        unit.pending = None
        for handle in unit.handles:
            if handle in self.jobs:
                handle.updated()
                if self.uses_gradients:
                    self.gradients.used(handle)
        if self.tiers.guards:
            self.memory.settle(unit.weights)
            self.tiers.guards.updated(unit.weights)

    def _state_is_shown(self, unit: Unit, left: list[int]) -> bool:
        """Whether the state of a unit lives in the memory that tensors show, a device's, and is updated there. State of
        an optimizer that the device has no kernel for moves to the host now, for good."""
        memory = self.memory
        pieces = [unit.pieces[index] for index in left]
        if not any(memory.keeps(piece.block) for piece in pieces):
            return False
        jobs = [job for piece in pieces for job in self._jobs_of(piece)]
        if all(memory.keeps(piece.block) for piece in pieces) and all(map(updates_on_device, jobs)):
            return True
        for block in (*(piece.block for piece in pieces), *self.gradients.blocks_in_use(unit.handles)):
            memory.keep_no_longer(block)
        return False

    def _apply_where_shown(self, unit: Unit, left: list[int]) -> None:
        memory = self.memory
        with ExitStack() as leases:
            blocks = self._blocks(unit)
            self.pager.use_update(unit, left[0], tuple(block.id for block in blocks))
            for block in blocks:
                memory.acquire_to_change(block)
                leases.callback(memory.release, block)
            while left:
                piece = unit.pieces[left[0]]
                memory.acquire_to_change(piece.block)
                try:
                    memory.will_change(piece.block)
                    memory.will_change(unit.weights)
                    run_piece(memory, self._kernels(), self.gradients, piece, self.jobs, self.grad_factor)
                finally:
                    memory.release(piece.block)
                memory.let_host_go(piece.block)
                del left[0]
                self.tiers.guards.updated(piece.block)

    def _kernels(self) -> DeviceKernels:
        landings = self.gradients.from_device
        if landings is None:
            raise RuntimeError("no device keeps optimizer state")
        return landings.kernels

    def _apply_on_host(self, unit: Unit, left: list[int], change: Change) -> None:
        with ExitStack() as leases:
            blocks = self._blocks(unit)
            started = False
            try:
                while left:
                    piece = unit.pieces[left[0]]
                    needed = [piece.block] if self._is_stateful(piece) else []
                    self.pager.use_update(unit, left[0], tuple(b.id for b in (*blocks, *needed)))
                    if not started:
                        for block in blocks:
                            self.memory.settle(block)
                        self._lease(leases, blocks)
                        change.will_change(unit.weights)
                        started = True
                    with ExitStack() as piece_lease:
                        self._lease(piece_lease, needed)
                        for block in needed:
                            change.will_change(block)
                        change.will_write(self._weight_ranges(piece))  # other blocks may slide to make room for it
                        self._run_piece(unit, piece, PieceView(self.tiers, piece) if needed else None, change)
                        for block in needed:
                            change.changed(block)
                        del left[0]
                    for block in needed:
                        self.tiers.guards.updated(block)
                change.changed(unit.weights)
            except BaseException:
                if started:
                    for handle in unit.handles:
                        handle.rewritten()  # the pieces before this one were no edit by the program
                raise
        if not started:  # other ranks own all that is updated; what the program has written may be this one's
            self.memory.settle(unit.weights)
        self.memory.refresh(unit.weights)

    def _blocks(self, unit: Unit) -> list[Block]:
        """Weights and landed gradients that the update of a unit needs."""
        return [unit.weights, *self.gradients.blocks_in_use(h for h in unit.handles if h in self.jobs)]

    def _lease(self, stack: ExitStack, blocks: list[Block]) -> None:
        for block in blocks:
            self.tiers.acquire(block)
            stack.callback(self.tiers.release, block)

    def _weight_ranges(self, piece: StatePiece) -> Iterator[tuple[int, int]]:
        """Addresses and bytes of the weights that the update of a piece writes."""
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            if handle in self.jobs:
                yield handle.element_address(part.start), part.numel * handle.dtype.itemsize

    def _run_piece(self, unit: Unit, piece: StatePiece, view: PieceView | None, change: Change) -> None:
        hypers: list[Hyper] = []
        segments: list[Segment] = []
        keep: list[torch.Tensor] = []
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            job = self.jobs.get(handle)
            if job is None:
                continue
            if not hypers or (hypers[-1] is not job.hyper and hypers[-1] != job.hyper):
                hypers.append(job.hyper)
            grad, grad_dtype = self.gradients.address(handle, part.start, keep)
            segments.append(
                Segment(
                    numel=part.numel,
                    hyper_index=len(hypers) - 1,
                    grad=grad,
                    grad_dtype=grad_dtype,
                    weight=handle.element_address(part.start),
                    weight_dtype=NATIVE_DTYPES[handle.dtype],
                    **(self._state(piece, view, part, handle, job) if view is not None else {}),
                )
            )
        begin_s = time.perf_counter()
        elsewhere, threads = change.elsewhere(), num_threads()
        self.rule.kernel(
            segments, hypers, piece.kind, grad_factor=self.grad_factor, num_threads=threads, elsewhere=elsewhere
        )
        if elsewhere:
            change.wrote(place for segment in segments for place in ranges_of(segment, piece.format.dtype))
        if self.tiers.timeline is not None:
            name, nbytes = f"update {unit.name}", piece.block.nbytes
            self.tiers.timeline.add(Lane.UPDATE, name, begin_s, time.perf_counter(), nbytes)

    def _state(
        self, piece: StatePiece, view: PieceView, part: PieceSegment, handle: ParamHandle, job: UpdateJob
    ) -> dict[str, int]:
        """Addresses of a segment's arrays by field, up to date with the weight and, in a first step, filled."""
        if handle.master_stale:
            follow_weight(self.tiers, piece, part, handle)
        if job.first:
            for key, field in job.addressed.items():
                view.fill(field, part, job.initial.get(key, 0.0))
        state = {field: view.array(field, part) for field in job.addressed.values()}
        lead = MASTER_PART_KEYS.get(piece.kind)
        if lead is not None:
            state[lead] = view.lead(part)
        return state


def check_paged(handle: ParamHandle, name: str) -> None:
    """Raise ``UnsupportedError`` for a gradient or parameter that the kernels do not take."""
    param = handle.tensor
    raw = get_grad(param) if param is not None else None
    if raw is not None and raw.is_sparse:
        raise UnsupportedError(
            f"{handle.name} has a sparse gradient; {name} needs dense ones (nn.Embedding(sparse=False))"
        )
    handle.check_stored_as_shown(name)
    if handle.dtype not in NATIVE_DTYPES:
        raise UnsupportedError(f"{handle.name} is {handle.dtype}; {name} updates float32, bfloat16 and float16 weights")
