"""The update of units whose optimizer state is kept on the device, by torch's fused kernels there.

The host's path in the same order (``csrc/cpu_adam``): the fp32 master is put together from the bf16 weight and its
remainder, or is the state's own array, or the weight; Adam; and the split again. torch's kernels
calculate in another order than ours, so results agree within rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.native.cpu_adam import AdamHyper, StateDType, StateLayout
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.state import array_offset, lead_offset
from deepoffload.params.layout import PieceSegment
from deepoffload.params.torch_private import fused_adam, fused_adamw, get_grad, outside_user_modes
from deepoffload.params.unit import ParamHandle, StatePiece


def updates_on_device(job: UpdateJob) -> bool:
    """Whether torch's fused kernels make this job's update: Adam and AdamW with fp32 moments and bias correction."""
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
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            if handle in jobs:
                grad = _gradient(memory, gradients, handle, part).float().mul(grad_factor)
                _run_segment(memory, piece, part, handle, jobs[handle], grad)


def _run_segment(
    memory: ShownMemory, piece: StatePiece, part: PieceSegment, handle: ParamHandle, job: UpdateJob, grad: Tensor
) -> None:
    if handle.block is None:
        raise RuntimeError(f"{handle.name} has no block")
    start_bytes = handle.form.offset_shown + part.start * handle.itemsize
    weight = memory.flat(handle.block, start_bytes, handle.dtype, part.numel)
    moments = [_array(memory, piece, part, field) for field in ("exp_avg", "exp_avg_sq")]
    if job.first:
        for moment in moments:
            moment.zero_()
    master, write_back = _master(memory, piece, part, handle, weight)
    hyper: AdamHyper = job.hyper
    step = torch.full((), float(hyper.step), dtype=torch.float32, device=memory.device)
    fused = fused_adamw if hyper.decoupled else fused_adam
    fused(
        [master],
        [grad],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=hyper.maximize,
    )
    write_back()


def _master(
    memory: ShownMemory, piece: StatePiece, part: PieceSegment, handle: ParamHandle, weight: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """The fp32 master of a segment, and what brings it back into weight and state."""
    if piece.kind is StateLayout.FP32:
        return weight, lambda: None
    if piece.kind is StateLayout.MASTER:
        master = memory.flat(piece.block, lead_offset(piece, part), torch.float32, part.numel)
        if handle.master_stale:
            master.copy_(weight)
        return master, partial(_write_back, weight, master)
    remainder = memory.flat(piece.block, lead_offset(piece, part), torch.int16, part.numel)
    if handle.master_stale:
        remainder.zero_()
    high = weight.view(torch.int16).to(torch.int32) << 16
    joined = (high + remainder.to(torch.int32)).view(torch.float32)

    return joined, partial(split, weight, remainder, joined)


def split(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """``cpu_adam.split_fp32`` on a device: bf16, int16 and fp32. A NaN loses what of it the weight does not show."""
    bits = master.view(torch.int32)
    bits = bits - ((bits & 0x1FFFF) == 0x8000).int()  # the tie whose remainder would not fit
    rounded = (bits + 0x8000) >> 16
    nan = master.isnan()  # to add 0x8000 could carry into the sign
    rounded = torch.where(nan, (bits >> 16) | 0x40, rounded)
    weight.view(torch.int16).copy_(rounded)
    remainder.copy_(torch.where(nan, 0, bits - (rounded << 16)))


def _write_back(weight: Tensor, master: Tensor) -> None:
    weight.copy_(master)


def _array(memory: ShownMemory, piece: StatePiece, part: PieceSegment, field: str) -> Tensor:
    return memory.flat(piece.block, array_offset(piece, field, part), torch.float32, part.numel)


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
