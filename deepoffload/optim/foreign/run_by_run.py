"""Steps of a class whose elements are independent: run by run, where the bytes are.

Each byte is read once. What has to be copied (16-bit weights in fp32, gradients with another factor) is small enough
for the processor's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import DType, StateDType, StateLayout
from deepoffload.optim.foreign.class_calls import ClassCalls
from deepoffload.optim.foreign.elementwise import RUN_NUMEL, is_elementwise, runs_of
from deepoffload.optim.foreign.fp32_values import GRADIENT_DTYPES, master_of, merge, put_master, run_of, weight_of
from deepoffload.optim.foreign.one_step import ForeignHyper, Operands
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.state import PieceView, values_at
from deepoffload.params.layout import PieceSegment
from deepoffload.params.unit import ParamHandle, StatePiece


class RunByRun:
    """The runs of one update. It keeps how much of a parameter is stepped, and goes on there."""

    def __init__(self, tiers: TierManager, gradients: Gradients, grad_factor: float, calls: ClassCalls) -> None:
        self._tiers = tiers
        self._gradients = gradients
        self._grad_factor = grad_factor
        self._calls = calls
        self._elements: dict[ParamHandle, int] = {}
        self._rooms: dict[str, Tensor] = {}

    def takes(self, handle: ParamHandle, job: UpdateJob) -> bool:
        """Whether the elements of a parameter are independent in its update."""
        hyper: ForeignHyper = job.hyper
        is_plain = hyper.method == "step" and bool(handle.shape)
        return is_plain and is_elementwise(self._calls.maker.made_class, hyper.settings)

    def is_done(self, handle: ParamHandle, part: PieceSegment) -> bool:
        """Whether a segment is stepped already."""
        return part.start + part.numel <= self._elements.get(handle, 0)

    def end(self, handle: ParamHandle) -> None:
        """All segments are stepped."""
        del self._elements[handle]

    def give_room_back(self) -> None:
        """The next run makes memory for its copies again."""
        self._rooms.clear()

    def step(self, handle: ParamHandle, job: UpdateJob, piece: StatePiece, part: PieceSegment) -> None:
        """Step a segment, whose piece is resident and will change. Each run begins with the numbers that the step
        before has left; the last one of the parameter keeps the new ones."""
        keep: list[Tensor] = []
        address, dtype = self._gradients.address(handle, 0, keep)
        grad = values_at(address, handle.numel, GRADIENT_DTYPES[dtype])
        weight = weight_of(handle)
        for run in runs_of(part, self._run_numel(handle, piece, dtype)):
            if run.start >= self._elements.get(handle, 0):
                self._step_run(handle, job, piece, run, run_of(weight, run), grad)

    def _run_numel(self, handle: ParamHandle, piece: StatePiece, grad_dtype: DType) -> int:
        """Where nothing is copied, shorter runs save nothing; neither do they on a device."""
        has_copies = piece.kind is not StateLayout.FP32 or piece.format.dtype is not StateDType.FP32
        has_copies = has_copies or self._grad_factor != 1.0 or grad_dtype is not DType.FP32
        return RUN_NUMEL if has_copies and handle.device.type == "cpu" else handle.numel

    def _step_run(
        self, handle: ParamHandle, job: UpdateJob, piece: StatePiece, run: PieceSegment, weight: Tensor, grads: Tensor
    ) -> None:
        view = PieceView(self._tiers, piece)
        if piece.kind is StateLayout.SPLIT_BF16:
            master = self._room_of("weight", run.numel)
            merge(run, view, weight, master)
        else:
            master = master_of(handle, piece, run, view, weight, flat=True)
        grad = grads[run.start : run.start + run.numel]
        if grad.dtype is not torch.float32 or self._grad_factor != 1.0:
            grad = self._room_of("grad", run.numel).copy_(grad)
            if self._grad_factor != 1.0:
                grad.mul_(self._grad_factor)
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
        entry = self._calls.entries[handle]
        if end < handle.numel:
            entry = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
        self._calls.make(handle, job, Operands(master, grad, arrays, entry))
        put_master(piece, run, view, weight, master)
        for key in () if is_fp32 else arrays:
            view.store_fp32(key, run, arrays[key].data_ptr())
        self._elements[handle] = end

    def _room_of(self, name: str, numel: int) -> Tensor:
        """Memory for one run; the same for all runs of a unit, because fresh memory costs more than it is used for."""
        room = self._rooms.get(name)
        if room is None or room.numel() < numel:
            room = self._rooms[name] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return room[:numel]
