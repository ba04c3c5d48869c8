"""The update of paged parameters by a class of another package: unit by unit, parameter by parameter.

A class whose elements are independent is stepped run by run. Another class gets whole parameters. One whose state lies
in one piece is stepped where its bytes are. Where it lies in several, they are copied together first and back
afterwards: only so much memory is taken beyond the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from deepoffload.native.cpu_adam import StateDType, StateLayout
from deepoffload.optim.foreign.class_calls import ClassCalls
from deepoffload.optim.foreign.fp32_values import (
    GRADIENT_DTYPES,
    Place,
    master_of,
    new_values,
    places_of,
    put_master,
    run_of,
    shaped,
    weight_of,
)
from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.one_step import ForeignHyper, Operands
from deepoffload.optim.foreign.packed import packed_key, packed_keys
from deepoffload.optim.foreign.run_by_run import RunByRun
from deepoffload.optim.foreign.state_form import StateForm, plain_surroundings
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.relayout import fit_pieces
from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.optim.state import LAYOUTS, PieceView, follow_weight, values_at
from deepoffload.optim.update import HostUpdate
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StatePiece, Unit


class ForeignUpdate(HostUpdate):
    """One step of a class of another package. It keeps which parameters remain, and resumes there.

    Args:
        forms, entries: as :class:`ClassCalls` has them.
    """

    def __init__(
        self,
        pager: Pager,
        gradients: Gradients,
        rule: Rule,
        jobs: Mapping[ParamHandle, UpdateJob],
        grad_factor: float,
        maker: Maker,
        forms: Mapping[ParamHandle, StateForm],
        entries: Mapping[ParamHandle, dict[str, Any]],
    ) -> None:
        super().__init__(pager, gradients, rule, jobs, grad_factor)
        self._calls = ClassCalls(maker, forms, entries)
        self._runs = RunByRun(self.tiers, gradients, grad_factor, self._calls)
        self._stepped: dict[ParamHandle, Operands] = {}

    def blocks_to_change(self, unit: Unit) -> None:
        """Nothing is said in advance: what comes of it is known when the class has made it."""
        return

    def apply(self, unit: Unit) -> None:
        """Update what is left of a unit, as :class:`HostUpdate` does. ``_left`` are numbers of its parameters."""
        left = self._left.get(unit.index)
        if left is None:
            fit_pieces(self.tiers, unit, self.jobs)
            left = self._left[unit.index] = self._in_order(unit)
        for piece in unit.pieces:
            if self.memory.keeps(piece.block):
                self.memory.keep_no_longer(piece.block)
        self._step_all(unit, left)
        self._finished(unit)

    def _in_order(self, unit: Unit) -> list[int]:
        """Numbers of the parameters to update, in the order of their pieces."""
        numbers = {handle: number for number, handle in enumerate(unit.handles) if handle in self.jobs}
        listed = [piece.handles[part.tensor] for piece in unit.pieces for part in piece.layout.segments]
        return [numbers[handle] for handle in dict.fromkeys(listed) if handle in numbers]

    def _step_all(self, unit: Unit, left: list[int]) -> None:
        with ExitStack() as leases:
            blocks = self._blocks(unit)
            started = False
            try:
                while left:
                    handle = unit.handles[left[0]]
                    places = places_of(unit, handle)
                    number, stateful = unit.pieces.index(places[0][0]), self._is_stateful(places[0][0])
                    needed = [places[0][0].block] if stateful else []
                    self.pager.use_update(unit, number, tuple(block.id for block in (*blocks, *needed)))
                    if not started:
                        for block in blocks:
                            self.memory.settle(block)
                        self._lease(leases, blocks)
                        self.tiers.will_change(unit.weights)
                        started = True
                    self._step(unit, handle, places if stateful else [])
                    del left[0]
                    for piece, _ in places if stateful else []:
                        self.tiers.guards.updated(piece.block)
            except BaseException:
                if started:
                    for handle in unit.handles:
                        handle.rewritten()  # the parameters before this one were no edit by the program
                raise
            finally:
                self._runs.give_room_back()
        if not started:
            self.memory.settle(unit.weights)
        self.memory.refresh(unit.weights)

    def _step(self, unit: Unit, handle: ParamHandle, places: list[Place]) -> None:
        self._calls.check(handle)
        job = self.jobs[handle]
        with plain_surroundings(handle.device.type):
            if places and self._runs.takes(handle, job):
                self._step_run_by_run(unit, handle, places)
            elif len(places) <= 1:
                self._step_in_place(handle, places)
            else:
                if handle not in self._stepped:
                    operands = self._gather(unit, handle, places)
                    self._calls.make(handle, job, operands)
                    self._stepped[handle] = operands
                self._scatter(unit, handle, places)
                del self._stepped[handle]

    def _step_run_by_run(self, unit: Unit, handle: ParamHandle, places: list[Place]) -> None:
        blocks = tuple(block.id for block in self._blocks(unit))
        for index, (piece, part) in enumerate(places):
            if self._runs.is_done(handle, part):
                continue
            if index:
                self.pager.use_update(unit, unit.pieces.index(piece), (*blocks, piece.block.id))
            with ExitStack() as lease:
                self._lease(lease, [piece.block])
                self.tiers.will_change(piece.block)
                if handle.master_stale:
                    follow_weight(self.tiers, piece, part, handle)
                self._runs.step(handle, self.jobs[handle], piece, part)
        self._runs.end(handle)

    # -- whole parameters ------------------------------------------------------------------------------------------

    def _step_in_place(self, handle: ParamHandle, places: list[Place]) -> None:
        with ExitStack() as lease:
            form, arrays = self._calls.forms[handle], {}
            for piece, _ in places:
                self._lease(lease, [piece.block])
                self.tiers.will_change(piece.block)
            weight = master = weight_of(handle)  # now that nothing slides any more
            for piece, part in places:
                view = PieceView(self.tiers, piece)
                if handle.master_stale:
                    follow_weight(self.tiers, piece, part, handle)
                master = master_of(handle, piece, part, view, weight)
                for key in form.arrays:
                    arrays[key] = self._array(handle, piece, part, view, key)
            room = self._room(handle)
            for piece, part in places:
                self._load(handle, piece, part, _packed_in(room, handle))
            operands = self._operands(handle, master, arrays, room)
            self._calls.make(handle, self.jobs[handle], operands)
            for piece, part in places:
                put_master(piece, part, PieceView(self.tiers, piece), weight, master)
                is_fp32 = piece.format.dtype is StateDType.FP32
                self._store(piece, part, {} if is_fp32 else _addresses(arrays))
                self._store(piece, part, _packed_in(room, handle))

    def _array(self, handle: ParamHandle, piece: StatePiece, part: PieceSegment, view: PieceView, field: str) -> Tensor:
        """An array of a parameter that lies in one piece: itself where it is fp32, else its values."""
        if piece.format.dtype is StateDType.FP32:
            return shaped(values_at(view.array(field, part), part.numel, torch.float32), handle)
        values = new_values(handle)
        if not self.jobs[handle].first:
            view.load_fp32(field, part, values.data_ptr())
        return values

    def _gather(self, unit: Unit, handle: ParamHandle, places: list[Place]) -> Operands:
        """Copies of what several pieces hold."""
        form = self._calls.forms[handle]
        is_own = LAYOUTS[handle.dtype] is StateLayout.FP32
        master = None if is_own else new_values(handle)
        arrays, room = {key: new_values(handle) for key in form.arrays}, self._room(handle)
        targets = {**_addresses(arrays), **_packed_in(room, handle)}
        for piece, part in self._one_by_one(unit, places):
            view = PieceView(self.tiers, piece)
            if handle.master_stale:
                self.tiers.will_change(piece.block)
                follow_weight(self.tiers, piece, part, handle)
            if master is not None:
                run = run_of(weight_of(handle), part)
                run_of(master, part).copy_(master_of(handle, piece, part, view, run, flat=True))
            self._load(handle, piece, part, targets)
        return self._operands(handle, weight_of(handle) if master is None else master, arrays, room)

    def _scatter(self, unit: Unit, handle: ParamHandle, places: list[Place]) -> None:
        """Bring copies back; what is back already may be brought again. The order of uses knows of it, or pieces would
        leave memory between being read and being written."""
        operands = self._stepped[handle]
        sources = {**_addresses(operands.arrays), **_packed_in(operands.room, handle)}
        for piece, part in self._one_by_one(unit, places, overwrite=True):
            self.tiers.will_change(piece.block)
            weight = run_of(weight_of(handle), part)
            put_master(piece, part, PieceView(self.tiers, piece), weight, run_of(operands.weight, part))
            self._store(piece, part, sources)

    def _one_by_one(self, unit: Unit, places: list[Place], *, overwrite: bool = False) -> Iterator[Place]:
        """Places whose pieces are resident until the next one is asked for.

        Args:
            overwrite: what a piece holds of the parameter is not read.
        """
        blocks = tuple(block.id for block in self._blocks(unit))
        for piece, part in places:
            self.pager.use_update(unit, unit.pieces.index(piece), (*blocks, piece.block.id))
            is_alone = part.numel == sum(each.numel for each in piece.layout.segments)
            self.tiers.acquire(piece.block, load=not (overwrite and is_alone))
            try:
                yield piece, part
            finally:
                self.tiers.release(piece.block)

    def _load(self, handle: ParamHandle, piece: StatePiece, part: PieceSegment, targets: Mapping[str, int]) -> None:
        """Copy fields of a piece to where they are in fp32; a first step has nothing to copy."""
        view = PieceView(self.tiers, piece)
        for field, address in {} if self.jobs[handle].first else targets.items():
            view.load_fp32(field, part, address + part.start * 4)

    def _store(self, piece: StatePiece, part: PieceSegment, sources: Mapping[str, int]) -> None:
        view = PieceView(self.tiers, piece)
        for field, address in sources.items():
            view.store_fp32(field, part, address + part.start * 4)

    def _operands(
        self, handle: ParamHandle, master: Tensor, arrays: Mapping[str, Tensor], room: Tensor | None
    ) -> Operands:
        keep: list[Tensor] = []
        hyper: ForeignHyper = self.jobs[handle].hyper
        grad = None
        if hyper.method == "step":
            address, dtype = self.gradients.address(handle, 0, keep)
            grad = shaped(values_at(address, handle.numel, GRADIENT_DTYPES[dtype]), handle)
            if keep or grad.dtype is not torch.float32 or self.grad_factor != 1.0:
                grad = grad.to(torch.float32, copy=True).mul_(self.grad_factor)
        return Operands(master, grad, arrays, self._calls.entries[handle], room)

    def _room(self, handle: ParamHandle) -> Tensor | None:
        """Memory for the bytes of packed state."""
        keys = packed_keys(self._calls.forms[handle].packed, handle.numel)
        return torch.zeros(len(keys) * handle.numel * 4, dtype=torch.uint8, device="cpu") if keys else None


def _addresses(arrays: Mapping[str, Tensor]) -> dict[str, int]:
    return {key: array.data_ptr() for key, array in arrays.items()}


def _packed_in(room: Tensor | None, handle: ParamHandle) -> dict[str, int]:
    """Where the arrays of packed state begin in their room."""
    if room is None:
        return {}
    array_bytes = handle.numel * 4
    return {packed_key(n): room.data_ptr() + n * array_bytes for n in range(room.numel() // array_bytes)}
