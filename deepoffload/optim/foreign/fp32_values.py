"""fp32 values of weights for a class of optimizers: themselves, or made of what their pieces hold, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, StateLayout
from deepoffload.optim.state import PieceView, values_at
from deepoffload.optim.threads import num_threads
from deepoffload.params.layout import PieceSegment
from deepoffload.params.unit import ParamHandle, StatePiece, Unit

GRADIENT_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}

Place = tuple[StatePiece, PieceSegment]
"""A piece, and the run of one parameter in it."""


def places_of(unit: Unit, handle: ParamHandle) -> list[Place]:
    """Where the pieces hold a parameter."""
    return [
        (piece, part) for piece in unit.pieces for part in piece.layout.segments if piece.handles[part.tensor] is handle
    ]


def shaped(flat: Tensor, handle: ParamHandle) -> Tensor:
    """Values in the order of the parameter's memory, with its shape."""
    return flat.as_strided(handle.shape, handle.stride)


def new_values(handle: ParamHandle) -> Tensor:
    """Memory for fp32 values of a parameter."""
    return shaped(torch.empty(handle.numel, dtype=torch.float32, device="cpu"), handle)


def run_of(tensor: Tensor, part: PieceSegment) -> Tensor:
    """Elements of a parameter-shaped tensor in the order of memory."""
    return tensor.as_strided((part.numel,), (1,), tensor.storage_offset() + part.start)


def weight_of(handle: ParamHandle) -> Tensor:
    """The stored weight, whose block is resident."""
    return shaped(values_at(handle.element_address(0), handle.numel, handle.dtype), handle)


def master_of(
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
        merge(part, view, weight, found)
    return found if flat else shaped(found, handle)


def merge(part: PieceSegment, view: PieceView, weight: Tensor, target: Tensor) -> None:
    """Make the fp32 values of a run of bf16 weights."""
    threads = num_threads()
    cpu_adam.merge_fp32(weight.data_ptr(), view.lead(part), target.data_ptr(), part.numel, num_threads=threads)


def put_master(piece: StatePiece, part: PieceSegment, view: PieceView, weight: Tensor, master: Tensor) -> None:
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
