"""Optimizer state of paged parameters: the pieces of a unit, and where each array lies in them.

A piece of ``n`` (padded) elements holds, one after the other, what its layout needs beside the weight: the int16 remainder
of the fp32 master (bf16 weights) or the fp32 master itself (fp16 weights), then exp_avg and exp_avg_sq in fp32.
"""

from __future__ import annotations

import ctypes

import torch

from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import StateLayout
from deepoffload.params.layout import PieceLayout, PieceSegment, cut_pieces
from deepoffload.params.torch_private import bare
from deepoffload.params.unit import ParamHandle, StatePiece, Unit
from deepoffload.schedule.placement import Kind

PIECE_NUMEL = 2 << 20
"""Elements per piece: 20 to 24 MiB of state, what the disk pipeline was fastest with; smaller budgets get smaller ones."""

LAYOUTS = {
    torch.float32: StateLayout.FP32,
    torch.bfloat16: StateLayout.SPLIT_BF16,
    torch.float16: StateLayout.MASTER,
}

_LEAD_BYTES = {StateLayout.FP32: 0, StateLayout.SPLIT_BF16: 2, StateLayout.MASTER: 4}


def bytes_per_element(layout: StateLayout) -> int:
    """Bytes of optimizer state per parameter, beside its weight and gradient."""
    return _LEAD_BYTES[layout] + 8


def make_pieces(
    tiers: TierManager, unit: Unit, trained: list[tuple[ParamHandle, torch.dtype]], piece_numel: int
) -> list[StatePiece]:
    """Blocks for the state of trainable parameters, given with their compute dtypes; they take memory when first used."""
    pieces: list[StatePiece] = []
    for dtype, layout in LAYOUTS.items():
        group = [handle for handle, compute_dtype in trained if compute_dtype is dtype]
        for piece in cut_pieces([h.numel for h in group], piece_numel):
            name = f"{unit.name}.state[{len(pieces)}]"
            block = tiers.create(name, Kind.STATE, piece.numel * bytes_per_element(layout))
            pieces.append(StatePiece(block, piece, layout, group))
    return pieces


class PieceView:
    """Addresses inside a resident piece."""

    def __init__(self, tiers: TierManager, piece: StatePiece) -> None:
        self._base = tiers.address(piece.block)
        self._numel = piece.layout.numel
        self._lead = _LEAD_BYTES[piece.kind]

    def lead(self, segment: PieceSegment) -> int:
        """Remainder (int16) or master (fp32) of a segment; 0 when the layout has neither."""
        return self._base + segment.piece_start * self._lead if self._lead else 0

    def exp_avg(self, segment: PieceSegment) -> int:
        return self._base + self._numel * self._lead + segment.piece_start * 4

    def exp_avg_sq(self, segment: PieceSegment) -> int:
        return self._base + self._numel * (self._lead + 4) + segment.piece_start * 4


def follow_weight(tiers: TierManager, piece: StatePiece, segment: PieceSegment, handle: ParamHandle) -> None:
    """Make the fp32 master the exact value of the weight, which the program has set. Both blocks must be resident."""
    view = PieceView(tiers, piece)
    if piece.kind is StateLayout.SPLIT_BF16:
        ctypes.memset(view.lead(segment), 0, segment.numel * 2)
    elif piece.kind is StateLayout.MASTER:
        with bare():
            buffer, base = tiers.arena.buffer, tiers.arena.address
            source = handle.address() + segment.start * handle.itemsize - base
            weight = torch.frombuffer(buffer, dtype=handle.dtype, count=segment.numel, offset=source)
            target = view.lead(segment) - base
            torch.frombuffer(buffer, dtype=torch.float32, count=segment.numel, offset=target).copy_(weight)


def whole_segment(piece: PieceLayout, tensor: int) -> list[PieceSegment]:
    """The runs of one tensor's elements in a piece."""
    return [segment for segment in piece.segments if segment.tensor == tensor]
