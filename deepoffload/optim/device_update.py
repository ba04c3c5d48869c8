"""The update of units whose optimizer state is kept on the device, by operators that run there.

The host's path in the same order (``csrc/cpu_adam``): the fp32 master is put together from the bf16 weight and its
remainder, or is the state's own array, or the weight; Adam; and the split again. The bits are the host's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.native.cpu_adam import AdamHyper, StateDType, StateLayout
from deepoffload.optim.device_arithmetic import SCRATCH_BYTES_PER_ELEMENT, AdamCoefficients, Arithmetic
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.state import array_offset, lead_offset
from deepoffload.params.layout import PieceSegment
from deepoffload.params.torch_private import get_grad, outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece

CHUNK_NUMEL_MAX = 16 << 20
"""Elements that are updated at once, at most; fewer where the budget has less memory for what that needs meanwhile."""


def updates_on_device(job: UpdateJob) -> bool:
    """Whether this job's update is made on a device: Adam and AdamW with fp32 moments and bias correction."""
    hyper = job.hyper
    if not isinstance(hyper, AdamHyper) or not job.master_weights:
        return False
    return hyper.state_dtype is StateDType.FP32 and hyper.bias_correction and not hyper.amsgrad


def run_piece(
    memory: ShownMemory,
    gradients: Gradients,
    piece: StatePiece,
    jobs: Mapping[ParamHandle, UpdateJob],
    grad_factor: float,
) -> None:
    """Update what of ``jobs`` lies in a piece. Its block, the unit's weights and gradients have been acquired."""
    with outside_user_modes():
        scratch = memory.scratch()
        chunk_numel = min(CHUNK_NUMEL_MAX, scratch.numel() // SCRATCH_BYTES_PER_ELEMENT)
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            if handle in jobs:
                segment = _Segment(memory, gradients, piece, part, handle)
                _run_segment(segment, jobs[handle], grad_factor, scratch, chunk_numel)


class _Segment:
    """What of one parameter lies in a piece, flat: its weight, gradient and state."""

    def __init__(
        self, memory: ShownMemory, gradients: Gradients, piece: StatePiece, part: PieceSegment, handle: ParamHandle
    ) -> None:
        if handle.block is None:
            raise RuntimeError(f"{handle.name} has no block")
        start_bytes = handle.form.offset_shown + part.start * handle.itemsize
        self.numel = part.numel
        self.stale = handle.master_stale
        self.weight = memory.flat(handle.block, start_bytes, handle.dtype, part.numel)
        self.grad = _gradient(memory, gradients, handle, part)
        self.exp_avg, self.exp_avg_sq = (
            memory.flat(piece.block, array_offset(piece, field, part), torch.float32, part.numel)
            for field in ("exp_avg", "exp_avg_sq")
        )
        self.lead: Tensor | None = None
        if piece.kind is not StateLayout.FP32:
            lead_dtype = torch.float32 if piece.kind is StateLayout.MASTER else torch.int16
            self.lead = memory.flat(piece.block, lead_offset(piece, part), lead_dtype, part.numel)


def _run_segment(segment: _Segment, job: UpdateJob, grad_factor: float, scratch: Tensor, chunk_numel: int) -> None:
    coefficients = AdamCoefficients.of(job.hyper, grad_factor)
    root_correction2 = torch.full((), coefficients.root_correction2, dtype=torch.float32, device=scratch.device)
    if job.first:
        segment.exp_avg.zero_()
        segment.exp_avg_sq.zero_()
    for start in range(0, segment.numel, chunk_numel):
        chunk = slice(start, min(start + chunk_numel, segment.numel))
        work = Arithmetic(scratch, chunk.stop - chunk.start)
        work.grad.copy_(segment.grad[chunk])
        weight, lead = segment.weight[chunk], None if segment.lead is None else segment.lead[chunk]
        work.join(weight, lead, stale=segment.stale)
        work.adam(segment.exp_avg[chunk], segment.exp_avg_sq[chunk], coefficients, root_correction2)
        work.split(weight, lead)


def _gradient(memory: ShownMemory, gradients: Gradients, handle: ParamHandle, part: PieceSegment) -> Tensor:
    slot = gradients.in_block(handle)
    if slot is not None and slot.block is not None:
        return memory.flat(slot.block, slot.form.offset_shown + part.start * slot.itemsize, slot.dtype, part.numel)
    param = handle.tensor
    raw = get_grad(param) if param is not None else None
    if raw is None:
        raise RuntimeError(f"{handle.name} has no gradient")
    ordered = torch.empty_strided(handle.shape, handle.stride, dtype=raw.dtype, device=raw.device).copy_(raw)
    return ordered.as_strided((handle.numel,), (1,))[part.start : part.start + part.numel]
