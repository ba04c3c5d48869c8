"""The update of paged parameters by a class of another package: unit by unit, parameter by parameter.

A class whose elements are independent is stepped run by run, where the bytes are: each is read once, and what has to be
copied (16-bit weights in fp32, gradients with another factor) is small enough for the processor's cache. Another class
gets whole parameters. One whose state lies in one piece is stepped where its bytes are. Where it lies in several, they
are copied together first and back afterwards: only so much memory is taken beyond the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, StateDType, StateLayout
from deepoffload.optim.foreign.elementwise import RUN_NUMEL, is_elementwise, runs_of
from deepoffload.optim.foreign.maker import Maker
from deepoffload.optim.foreign.one_step import ForeignHyper, OneStep, Operands
from deepoffload.optim.foreign.state_form import StateForm
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.relayout import fit_pieces
from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.optim.state import LAYOUTS, PieceView, follow_weight, values_at
from deepoffload.optim.threads import num_threads
from deepoffload.optim.update import HostUpdate
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece, Unit

_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}

_Place = tuple[StatePiece, PieceSegment]
"""A piece, and the run of one parameter in it."""


class ForeignUpdate(HostUpdate):
    """One step of a class of another package. It keeps which parameters remain, and resumes there.

    Args:
        forms: the state of each parameter in ``jobs``.
        entries: what of it stays in memory; changed in place.
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
        self._maker = maker
        self._forms = forms
        self._entries = entries
        self._stepped: dict[ParamHandle, Operands] = {}
        self._elements: dict[ParamHandle, int] = {}  # so many of a parameter are stepped
        self._rooms: dict[str, Tensor] = {}
        self._failed: dict[ParamHandle, BaseException] = {}

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
                    places = _places(unit, handle)
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
                self._rooms.clear()
        if not started:
            self.memory.settle(unit.weights)
        self.memory.refresh(unit.weights)

    def _step(self, unit: Unit, handle: ParamHandle, places: list[_Place]) -> None:
        if handle in self._failed:
            raise _not_again(handle, self._failed[handle])
        with outside_user_modes():
            if places and self._by_elements(handle):
                self._step_by_elements(unit, handle, places)
            elif len(places) <= 1:
                self._step_in_place(handle, places)
            else:
                if handle not in self._stepped:
                    operands = self._gather(unit, handle, places)
                    self._run(handle, operands)
                    self._stepped[handle] = operands
                self._scatter(unit, handle, places)
                del self._stepped[handle]

    def _run(self, handle: ParamHandle, operands: Operands) -> None:
        job = self.jobs[handle]
        hyper: ForeignHyper = job.hyper
        step = OneStep(self._maker, hyper, self._forms[handle], handle.name, handle.device)
        try:
            step.make(operands, first=job.first)
        except BaseException as error:
            self._failed[handle] = error
            raise

    # -- run by run ------------------------------------------------------------------------------------------------

    def _by_elements(self, handle: ParamHandle) -> bool:
        hyper: ForeignHyper = self.jobs[handle].hyper
        is_plain = hyper.method == "step" and bool(handle.shape)
        return is_plain and is_elementwise(self._maker.made_class, hyper.settings)

    def _step_by_elements(self, unit: Unit, handle: ParamHandle, places: list[_Place]) -> None:
        """All runs begin with the numbers that the step before has left; the last one keeps the new ones."""
        blocks = tuple(block.id for block in self._blocks(unit))
        for index, (piece, part) in enumerate(places):
            if part.start + part.numel <= self._elements.get(handle, 0):
                continue
            if index:
                self.pager.use_update(unit, unit.pieces.index(piece), (*blocks, piece.block.id))
            with ExitStack() as lease:
                self._lease(lease, [piece.block])
                self.tiers.will_change(piece.block)
                if handle.master_stale:
                    follow_weight(self.tiers, piece, part, handle)
                keep: list[Tensor] = []
                address, dtype = self.gradients.address(handle, 0, keep)
                grad = values_at(address, handle.numel, _DTYPES[dtype])
                for run in runs_of(part, self._run_numel(handle, piece, dtype)):
                    if run.start >= self._elements.get(handle, 0):
                        self._step_run(handle, piece, run, grad)
        del self._elements[handle]

    def _run_numel(self, handle: ParamHandle, piece: StatePiece, grad_dtype: DType) -> int:
        """Where nothing is copied, shorter runs save nothing; neither do they on a device."""
        has_copies = piece.kind is not StateLayout.FP32 or piece.format.dtype is not StateDType.FP32
        has_copies = has_copies or self.grad_factor != 1.0 or grad_dtype is not DType.FP32
        return RUN_NUMEL if has_copies and handle.device.type == "cpu" else handle.numel

    def _step_run(self, handle: ParamHandle, piece: StatePiece, run: PieceSegment, grads: Tensor) -> None:
        job, view = self.jobs[handle], PieceView(self.tiers, piece)
        weight = _run_of(self._weight(handle), run)
        if piece.kind is StateLayout.SPLIT_BF16:
            master = self._room_of("weight", run.numel)
            _merge(run, view, weight, master)
        else:
            master = _master(handle, piece, run, view, weight, flat=True)
        grad = grads[run.start : run.start + run.numel]
        if grad.dtype is not torch.float32 or self.grad_factor != 1.0:
            grad = self._room_of("grad", run.numel).copy_(grad)
            if self.grad_factor != 1.0:
                grad.mul_(self.grad_factor)
        is_fp32 = piece.format.dtype is StateDType.FP32
        arrays = {}
        for key in job.fields:
            if is_fp32:
                arrays[key] = values_at(view.array(key, run), run.numel, torch.float32)
                continue
            arrays[key] = self._room_of(key, run.numel)
            if not job.first:
                view.load_fp32(key, run, arrays[key].data_ptr())
        end = run.start + run.numel
        entry = self._entries[handle]
        if end < handle.numel:
            entry = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
        self._run(handle, Operands(master, grad, arrays, entry))
        _put_master(piece, run, view, weight, master)
        for key in () if is_fp32 else arrays:
            view.store_fp32(key, run, arrays[key].data_ptr())
        self._elements[handle] = end

    def _room_of(self, name: str, numel: int) -> Tensor:
        """Memory for one run; the same for all runs of a unit, because fresh memory costs more than it is used for."""
        room = self._rooms.get(name)
        if room is None or room.numel() < numel:
            room = self._rooms[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return room[:numel]

    # -- where the bytes are ---------------------------------------------------------------------------------------

    def _step_in_place(self, handle: ParamHandle, places: list[_Place]) -> None:
        with ExitStack() as lease:
            arrays: dict[str, Tensor] = {}
            for piece, _ in places:
                self._lease(lease, [piece.block])
                self.tiers.will_change(piece.block)
            weight = master = self._weight(handle)  # now that nothing slides any more
            for piece, part in places:
                view = PieceView(self.tiers, piece)
                if handle.master_stale:
                    follow_weight(self.tiers, piece, part, handle)
                master = _master(handle, piece, part, view, weight)
                for field in self.jobs[handle].fields:
                    arrays[field] = self._array(handle, piece, part, view, field)
            operands = self._operands(handle, master, arrays)
            self._run(handle, operands)
            for piece, part in places:
                view = PieceView(self.tiers, piece)
                _put_master(piece, part, view, weight, master)
                if piece.format.dtype is not StateDType.FP32:
                    for field, array in arrays.items():
                        view.store_fp32(field, part, array.data_ptr())

    def _array(self, handle: ParamHandle, piece: StatePiece, part: PieceSegment, view: PieceView, field: str) -> Tensor:
        """An array of a parameter that lies in one piece: itself where it is fp32, else its values."""
        if piece.format.dtype is StateDType.FP32:
            return _shaped(values_at(view.array(field, part), part.numel, torch.float32), handle)
        values = self._room(handle)
        if not self.jobs[handle].first:
            view.load_fp32(field, part, values.data_ptr())
        return values

    def _gather(self, unit: Unit, handle: ParamHandle, places: list[_Place]) -> Operands:
        """Copies of what several pieces hold."""
        job = self.jobs[handle]
        is_own = LAYOUTS[handle.dtype] is StateLayout.FP32
        master = None if is_own else self._room(handle)
        arrays = {field: self._room(handle) for field in job.fields}
        blocks = tuple(block.id for block in self._blocks(unit))
        for piece, part in places:
            self.pager.use_update(unit, unit.pieces.index(piece), (*blocks, piece.block.id))
            with ExitStack() as lease:
                self._lease(lease, [piece.block])
                view = PieceView(self.tiers, piece)
                if handle.master_stale:
                    self.tiers.will_change(piece.block)
                    follow_weight(self.tiers, piece, part, handle)
                if master is not None:
                    run = _run_of(self._weight(handle), part)
                    _run_of(master, part).copy_(_master(handle, piece, part, view, run, flat=True))
                if not job.first:
                    for field, array in arrays.items():
                        view.load_fp32(field, part, array.data_ptr() + part.start * 4)
        return self._operands(handle, self._weight(handle) if master is None else master, arrays)

    def _scatter(self, unit: Unit, handle: ParamHandle, places: list[_Place]) -> None:
        """Bring copies back; what is back already may be brought again. The order of uses knows of it, or pieces would
        leave memory between being read and being written."""
        operands = self._stepped[handle]
        blocks = tuple(block.id for block in self._blocks(unit))
        for piece, part in places:
            self.pager.use_update(unit, unit.pieces.index(piece), (*blocks, piece.block.id))
            is_alone = part.numel == sum(each.numel for each in piece.layout.segments)
            with ExitStack() as lease:
                self.tiers.acquire(piece.block, load=not is_alone)
                lease.callback(self.tiers.release, piece.block)
                self.tiers.will_change(piece.block)
                view = PieceView(self.tiers, piece)
                weight = self._weight(handle)
                _put_master(piece, part, view, _run_of(weight, part), _run_of(operands.weight, part))
                for field, array in operands.arrays.items():
                    view.store_fp32(field, part, array.data_ptr() + part.start * 4)

    def _operands(self, handle: ParamHandle, master: Tensor, arrays: Mapping[str, Tensor]) -> Operands:
        keep: list[Tensor] = []
        hyper: ForeignHyper = self.jobs[handle].hyper
        grad = None
        if hyper.method == "step":
            address, dtype = self.gradients.address(handle, 0, keep)
            grad = _shaped(values_at(address, handle.numel, _DTYPES[dtype]), handle)
            if keep or grad.dtype is not torch.float32 or self.grad_factor != 1.0:
                grad = grad.to(torch.float32, copy=True).mul_(self.grad_factor)
        return Operands(master, grad, arrays, self._entries[handle])

    @staticmethod
    def _room(handle: ParamHandle) -> Tensor:
        return _shaped(torch.empty(handle.numel, dtype=torch.float32, device="cpu"), handle)

    @staticmethod
    def _weight(handle: ParamHandle) -> Tensor:
        return _shaped(values_at(handle.element_address(0), handle.numel, handle.dtype), handle)


def _not_again(handle: ParamHandle, error: BaseException) -> BaseException:
    """What is raised where a class that has failed would have to step again."""
    if isinstance(error, DeepOffloadError):
        return error
    said = UsageError(
        f"the optimizer's class has failed in the step of {handle.name}, with {type(error).__name__}: {error}. It has "
        "perhaps changed its state, so the step is not made again, and the model cannot go on: build it again and load "
        "a checkpoint"
    )
    said.__cause__ = error
    return said


def _places(unit: Unit, handle: ParamHandle) -> list[_Place]:
    """Where the pieces hold a parameter."""
    return [
        (piece, part) for piece in unit.pieces for part in piece.layout.segments if piece.handles[part.tensor] is handle
    ]


def _shaped(flat: Tensor, handle: ParamHandle) -> Tensor:
    return flat.as_strided(handle.shape, handle.stride)


def _run_of(tensor: Tensor, part: PieceSegment) -> Tensor:
    """Elements of a parameter-shaped tensor in the order of memory."""
    return tensor.as_strided((part.numel,), (1,), tensor.storage_offset() + part.start)


def _master(
    handle: ParamHandle, piece: StatePiece, part: PieceSegment, view: PieceView, weight: Tensor, *, flat: bool = False
) -> Tensor:
    """The fp32 value of a weight, or of a run of it (``flat``): itself where the weight is fp32 or the piece holds it,
    else a copy."""
    if piece.kind is StateLayout.FP32:
        return weight
    if piece.kind is StateLayout.MASTER:
        found = values_at(view.lead(part), part.numel, torch.float32)
    else:
        found = torch.empty(part.numel, dtype=torch.float32, device="cpu")
        _merge(part, view, weight, found)
    return found if flat else _shaped(found, handle)


def _merge(part: PieceSegment, view: PieceView, weight: Tensor, target: Tensor) -> None:
    threads = num_threads()
    cpu_adam.merge_fp32(weight.data_ptr(), view.lead(part), target.data_ptr(), part.numel, num_threads=threads)


def _put_master(piece: StatePiece, part: PieceSegment, view: PieceView, weight: Tensor, master: Tensor) -> None:
    """Make a 16-bit weight, or a run of it, and what completes it the fp32 value."""
    if piece.kind is StateLayout.MASTER:
        weight.copy_(master)
        lead = view.lead(part)
        if lead != master.data_ptr():
            cpu_adam.copy(lead, master.data_ptr(), part.numel * 4, num_threads())
    elif piece.kind is StateLayout.SPLIT_BF16:
        cpu_adam.split_fp32(
            master.data_ptr(), weight.data_ptr(), view.lead(part), part.numel, num_threads=num_threads()
        )
