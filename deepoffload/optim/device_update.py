"""The update of units whose optimizer state is kept on the device, by kernels that run there.

The host's path in the same order (``csrc/cpu_adam``): the fp32 master is put together from the bf16 weight and its
remainder, or is the state's own array, or the weight; Adam; and the split again. The bits are the host's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.native.cpu_adam import AdamHyper, StateDType, StateLayout
from deepoffload.optim.device_arithmetic import AdamCoefficients
from deepoffload.optim.device_kernels import DeviceKernels, DeviceSegment
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.state import array_offset, lead_offset
from deepoffload.params.layout import PieceSegment
from deepoffload.params.torch_private import get_grad, outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece


def updates_on_device(job: UpdateJob) -> bool:
    """Whether this job's update is made on a device: Adam and AdamW with fp32 moments and bias correction."""
    hyper = job.hyper
    if not isinstance(hyper, AdamHyper) or not job.master_weights:
        return False
    return hyper.state_dtype is StateDType.FP32 and hyper.bias_correction and not hyper.amsgrad


def run_piece(
    memory: ShownMemory,
    kernels: DeviceKernels,
    gradients: Gradients,
    piece: StatePiece,
    jobs: Mapping[ParamHandle, UpdateJob],
    grad_factor: float,
) -> None:
    """Update what of ``jobs`` lies in a piece. Its block, the unit's weights and gradients have been acquired."""
    with outside_user_modes():
        scratch = memory.scratch()
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            if handle in jobs:
                job = jobs[handle]
                segment = _segment(memory, gradients, piece, part, handle, first=job.first)
                kernels.update(segment, AdamCoefficients.of(job.hyper, grad_factor), scratch)


def _segment(
    memory: ShownMemory,
    gradients: Gradients,
    piece: StatePiece,
    part: PieceSegment,
    handle: ParamHandle,
    *,
    first: bool,
) -> DeviceSegment:
    if handle.block is None:
        raise RuntimeError(f"{handle.name} has no block")
    start_bytes = handle.form.offset_shown + part.start * handle.itemsize
    exp_avg, exp_avg_sq = (
        memory.flat(piece.block, array_offset(piece, field, part), torch.float32, part.numel)
        for field in ("exp_avg", "exp_avg_sq")
    )
    lead: Tensor | None = None
    if piece.kind is not StateLayout.FP32:
        lead_dtype = torch.float32 if piece.kind is StateLayout.MASTER else torch.int16
        lead = memory.flat(piece.block, lead_offset(piece, part), lead_dtype, part.numel)
    return DeviceSegment(
        memory.flat(handle.block, start_bytes, handle.dtype, part.numel),
        _gradient(memory, gradients, handle, part),
        exp_avg,
        exp_avg_sq,
        lead,
        first=first,
        stale=handle.master_stale,
    )


def _gradient(memory: ShownMemory, gradients: Gradients, handle: ParamHandle, part: PieceSegment) -> Tensor:
    slot = gradients.in_block(handle)
    if slot is not None and slot.block is not None:
        return memory.flat(slot.block, slot.form.offset_shown + part.start * slot.itemsize, slot.dtype, part.numel)
    param = handle.tensor
    raw = get_grad(param) if param is not None else None
    if raw is None:
        raise RuntimeError(f"{handle.name} has no gradient")
    if raw.stride() != handle.stride or raw.is_neg():
        raw = torch.empty_strided(handle.shape, handle.stride, dtype=raw.dtype, device=raw.device).copy_(raw)
    return raw.as_strided((handle.numel,), (1,), raw.storage_offset())[part.start : part.start + part.numel]
