"""Optimizer state of paged parameters: the pieces of a unit, and where each array lies in them.

A piece of ``n`` (padded) elements holds, one after the other, what its layout needs beside the weight: the int16
remainder of the fp32 master (bf16 weights) or the fp32 master itself (fp16 weights), then exp_avg and exp_avg_sq in
fp32.
"""

from __future__ import annotations

import ctypes

import torch

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import StateLayout
from deepoffload.params.layout import ALIGNMENT_NUMEL, PieceLayout, PieceSegment, cut_pieces
from deepoffload.params.torch_private import bare
from deepoffload.params.unit import ParamHandle, StatePiece, Unit
from deepoffload.schedule.placement import Kind

PIECE_BYTES = 28 << 20
"""A piece is about 20 to 28 MiB of state, what the disk pipeline was fastest with; smaller budgets get smaller ones."""

LEAST_PIECE_NUMEL = 1024
"""Below this a piece would be less than a few disk pages."""

SAME_ROOM = 0.9
"""A block of at least this share of its unit's largest takes as much room as that one."""

LAYOUTS = {
    torch.float32: StateLayout.FP32,
    torch.bfloat16: StateLayout.SPLIT_BF16,
    torch.float16: StateLayout.MASTER,
}

LEAD_KEYS = {StateLayout.SPLIT_BF16: "remainder", StateLayout.MASTER: "master"}
"""What completes a 16-bit weight to its fp32 master, by its name in ``Segment`` and in a ``state_dict``."""

PAGED_ARRAYS = ("exp_avg", "exp_avg_sq")
"""The fp32 arrays of a piece. Optimizers with one array leave the other as it is."""

PIECES_PER_ARENA = 14
"""A piece made late takes about this part of the memory at most."""

_LEAD_BYTES = {StateLayout.FP32: 0, StateLayout.SPLIT_BF16: 2, StateLayout.MASTER: 4}


def bytes_per_element(layout: StateLayout) -> int:
    """Bytes of optimizer state per parameter, beside its weight and gradient."""
    return _LEAD_BYTES[layout] + 8


def piece_numel(weight_bytes: int, layout: StateLayout, limit_bytes: int) -> int:
    """Elements per state piece: as many bytes as the unit's weights take, or an even part of them within
    ``limit_bytes``.

    Then pieces, weights and gradients of a unit fit into each other's room, and memory does not fall into splinters.
    """
    per_element = bytes_per_element(layout)
    parts = max(1, round(weight_bytes / min(limit_bytes, PIECE_BYTES)))
    numel = -(-weight_bytes // parts // per_element)
    return max(LEAST_PIECE_NUMEL, -(-numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL)


def equalise_room(blocks: list[Block]) -> None:
    """Give blocks of about the same size the same room in memory."""
    rooms: dict[int, int] = {}  # by size, the largest first
    for block in blocks:
        rooms[block.nbytes] = max(rooms.get(block.nbytes, 0), block.room_bytes)
    for nbytes in sorted(rooms, reverse=True):
        room = max(other for size, other in rooms.items() if size * SAME_ROOM <= nbytes)
        rooms[nbytes] = max(nbytes, room) if room * SAME_ROOM <= nbytes else nbytes
    for block in blocks:
        block.room_bytes = rooms[block.nbytes]


def make_pieces(
    tiers: TierManager, unit: Unit, trained: list[tuple[ParamHandle, torch.dtype]], limit_bytes: int
) -> list[StatePiece]:
    """Blocks for the state of trainable parameters, given with their compute dtypes; they take memory when first
    used."""
    pieces: list[StatePiece] = []
    present = len(unit.pieces)
    for dtype, layout in LAYOUTS.items():
        group = [handle for handle, compute_dtype in trained if compute_dtype is dtype]
        numel = piece_numel(unit.weights.nbytes, layout, limit_bytes)
        for piece in cut_pieces([h.numel for h in group], numel):
            name = f"{unit.name}.state[{present + len(pieces)}]"
            block = tiers.create(name, Kind.STATE, piece.numel * bytes_per_element(layout))
            pieces.append(StatePiece(block, piece, layout, group))
    return pieces


def ensure_pieces(tiers: TierManager, handle: ParamHandle) -> None:
    """Give a parameter that was frozen when its unit was made a piece of state; others have theirs."""
    unit = handle.unit
    if unit is not None and not any(handle in piece.handles for piece in unit.pieces):
        limit_bytes = tiers.arena.capacity_bytes // PIECES_PER_ARENA
        unit.pieces += make_pieces(tiers, unit, [(handle, handle.dtype)], limit_bytes)


class PieceView:
    """Addresses inside a resident piece."""

    def __init__(self, tiers: TierManager, piece: StatePiece) -> None:
        self._base = tiers.address(piece.block)
        self._numel = piece.layout.numel
        self._lead = _LEAD_BYTES[piece.kind]

    def lead(self, segment: PieceSegment) -> int:
        """Remainder (int16) or master (fp32) of a segment; 0 when the layout has neither."""
        return self._base + segment.piece_start * self._lead if self._lead else 0

    def array(self, field: str, segment: PieceSegment) -> int:
        """Address of a segment in one of :data:`PAGED_ARRAYS`."""
        before = self._lead + 4 * PAGED_ARRAYS.index(field)
        return self._base + self._numel * before + segment.piece_start * 4

    def fill(self, field: str, segment: PieceSegment, value: float) -> None:
        """Set a segment of an array to one value."""
        address = self.array(field, segment)
        if value:
            with bare():
                memory = (ctypes.c_float * segment.numel).from_address(address)
                torch.frombuffer(memory, dtype=torch.float32).fill_(value)
        else:
            ctypes.memset(address, 0, segment.numel * 4)


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
