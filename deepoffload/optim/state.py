"""Optimizer state of paged parameters: the pieces of a unit, and where each array lies in them.

A piece of ``n`` (padded) elements holds, one after the other, what its layout adds to the weight: the int16
remainder of the fp32 master (bf16 weights) or the fp32 master itself (fp16 weights), then the arrays of its format
(exp_avg and exp_avg_sq in fp32 until an optimizer wants others), then the scales of 8-bit ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.native.aio import round_up
from deepoffload.native.cpu_adam import STATE_BLOCK, DType, Segment, StateDType, StateLayout
from deepoffload.optim.eight_bit import SIGNED_FIELDS, num_blocks, torch_dtype
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.threads import num_threads
from deepoffload.params.layout import ALIGNMENT_NUMEL, PieceLayout, PieceSegment, cut_pieces, cut_whole
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import PLAIN_FORMAT, ParamHandle, StateFormat, StatePiece, Unit
from deepoffload.schedule.placement import BlockKind

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

MASTER_PART_KEYS = {StateLayout.SPLIT_BF16: "remainder", StateLayout.MASTER: "master"}
"""What completes a 16-bit weight to its fp32 master, by its name in ``Segment`` and in a ``state_dict``."""

PIECES_PER_ARENA = 14
"""A piece made late takes about this part of the memory at most."""

_LEAD_BYTES = {StateLayout.FP32: 0, StateLayout.SPLIT_BF16: 2, StateLayout.MASTER: 4}


_ARRAY_BYTES = {StateDType.FP32: 4, StateDType.BF16: 2, StateDType.EIGHT_BIT: 1}


def bytes_per_element(layout: StateLayout, state_format: StateFormat = PLAIN_FORMAT) -> int:
    """Bytes of optimizer state per parameter, without its weight and gradient (and 4 per block for 8-bit scales)."""
    return _LEAD_BYTES[layout] + _ARRAY_BYTES[state_format.dtype] * len(state_format.fields)


def lead_bytes(layout: StateLayout) -> int:
    """Bytes per element of what completes the weight to its fp32 value."""
    return _LEAD_BYTES[layout]


def _piece_bytes(numel: int, layout: StateLayout, state_format: StateFormat) -> int:
    scales = len(state_format.fields) * num_blocks(numel) * 4 if state_format.dtype is StateDType.EIGHT_BIT else 0
    return numel * bytes_per_element(layout, state_format) + scales


def piece_numel(
    weight_bytes: int,
    layout: StateLayout,
    limit_bytes: int,
    state_format: StateFormat = PLAIN_FORMAT,
    alignment_numel: int = ALIGNMENT_NUMEL,
) -> int:
    """Elements per state piece: as many bytes as the unit's weights take, or an even part of them within
    ``limit_bytes``.

    Then pieces, weights and gradients of a unit fit into each other's room, and memory does not fall into splinters.
    """
    per_element = max(1, bytes_per_element(layout, state_format))
    numel = -(-weight_bytes // pieces_per_unit(weight_bytes, limit_bytes) // per_element)
    return max(LEAST_PIECE_NUMEL, -(-numel // alignment_numel) * alignment_numel)


def pieces_per_unit(weight_bytes: int, limit_bytes: int) -> int:
    """How many pieces together take as much as a unit's weights."""
    return max(1, round(weight_bytes / max(1, min(limit_bytes, PIECE_BYTES))))


def equalise_room(blocks: list[Block]) -> None:
    """Give blocks of about the same size the same room in memory."""
    rooms = equal_rooms((block.nbytes, block.room_bytes) for block in blocks)
    for block in blocks:
        block.room_bytes = rooms[block.nbytes]


def equal_rooms(sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """By bytes of a unit's blocks, the room that each takes, from their (bytes, room) before."""
    rooms: dict[int, int] = {}
    for nbytes, room in sizes:
        rooms[nbytes] = max(rooms.get(nbytes, 0), room)
    for nbytes in sorted(rooms, reverse=True):
        room = max(other for size, other in rooms.items() if size * SAME_ROOM <= nbytes)
        rooms[nbytes] = max(nbytes, room) if room * SAME_ROOM <= nbytes else nbytes
    return {nbytes: round_up(room) for nbytes, room in rooms.items()}


def piece_runs(
    trained: Iterable[tuple[int, torch.dtype]],
    weight_bytes: int,
    limit_bytes: int,
    state_format: StateFormat,
    alignment_numel: int,
) -> Iterator[tuple[StateLayout, int, int, int]]:
    """The pieces that :func:`make_pieces` makes, as runs of equal ones: layout, elements, bytes, and how many.

    Tensors are padded to whole alignments, so all pieces of a layout are full, and the last one holds the rest.
    """
    padded = dict.fromkeys(LAYOUTS, 0)
    for numel, dtype in trained:
        padded[dtype] += round_up(numel, alignment_numel)
    for dtype, layout in LAYOUTS.items():
        numel = piece_numel(weight_bytes, layout, limit_bytes, state_format, alignment_numel)
        full, rest = divmod(padded[dtype], numel)
        for each, count in ((numel, full), (rest, 1 if rest else 0)):
            if count:
                yield layout, each, _piece_bytes(each, layout, state_format), count


def block_name(unit_name: str, kind: BlockKind, piece: int = 0) -> str:
    """What people are told of a unit's block; ``piece``: the number of a piece of state."""
    if kind is BlockKind.STATE:
        return f"{unit_name}.state[{piece}]"
    return unit_name if kind is BlockKind.WEIGHT else f"{unit_name}.grad"


def make_pieces(
    tiers: TierManager,
    unit: Unit,
    trained: list[tuple[ParamHandle, torch.dtype]],
    limit_bytes: int,
    state_format: StateFormat = PLAIN_FORMAT,
    alignment_numel: int = ALIGNMENT_NUMEL,
    typical_bytes: int | None = None,
    range_numels: Mapping[torch.dtype, int] | None = None,
    least_piece_numel: int = 0,
) -> list[StatePiece]:
    """Blocks for the state of trainable parameters, given with their compute dtypes; they take memory when first
    used. With several ranks they hold what this one owns.

    Args:
        typical_bytes: of the weights of a unit of the same model, whose pieces these ought to be like; the unit's own
            when not given.
        range_numels: by type, so many elements there are at least. What all ranks have as much of lets them plan alike.
        least_piece_numel: so many elements a piece may have at least.
    """
    pieces: list[StatePiece] = []
    present = len(unit.pieces)
    for dtype, layout in LAYOUTS.items():
        group = [handle for handle, compute_dtype in trained if compute_dtype is dtype]
        weight_bytes = unit.weights.nbytes if typical_bytes is None else typical_bytes
        numel = piece_numel(weight_bytes, layout, limit_bytes, state_format, alignment_numel)
        numel = max(numel, round_up(least_piece_numel, alignment_numel))
        least_numel = 0 if range_numels is None else range_numels.get(dtype, 0)
        cut = cut_whole if state_format.whole else cut_pieces
        for piece in cut(unit.own_runs(group), numel, alignment_numel, least_numel):
            name = block_name(unit.name, BlockKind.STATE, present + len(pieces))
            block = tiers.create(name, BlockKind.STATE, _piece_bytes(piece.numel, layout, state_format))
            pieces.append(StatePiece(block, piece, layout, group, state_format))
    return pieces


def ensure_pieces(tiers: TierManager, handle: ParamHandle) -> None:
    """Give a parameter that was frozen when its unit was made a piece of state; others have theirs. A rank makes none
    for one that others own."""
    unit = handle.unit
    if unit is not None and not any(handle in piece.handles for piece in unit.pieces):
        limit_bytes = tiers.arena.capacity_bytes // PIECES_PER_ARENA
        unit.pieces += make_pieces(tiers, unit, [(handle, handle.dtype)], limit_bytes)


def lead_offset(piece: StatePiece, segment: PieceSegment) -> int:
    """Where in a piece's block the remainder (int16) or master (fp32) of a segment begins, in bytes."""
    return segment.piece_start * _LEAD_BYTES[piece.kind]


def array_offset(piece: StatePiece, field: str, segment: PieceSegment) -> int:
    """Where in a piece's block a segment of one of its arrays begins, or (``exp_avg_absmax`` ...) of its scales."""
    numel, lead, size = piece.layout.numel, _LEAD_BYTES[piece.kind], _ARRAY_BYTES[piece.format.dtype]
    fields = piece.format.fields
    if field.endswith(SCALE_SUFFIX):
        before = fields.index(field.removesuffix(SCALE_SUFFIX)) * num_blocks(numel)
        return numel * (lead + size * len(fields)) + (before + segment.piece_start // STATE_BLOCK) * 4
    return numel * (lead + size * fields.index(field)) + segment.piece_start * size


class PieceView:
    """Addresses inside a resident piece."""

    def __init__(self, tiers: TierManager, piece: StatePiece) -> None:
        self._base = tiers.address(piece.block)
        self._piece = piece
        self._dtype = piece.format.dtype
        self._size = _ARRAY_BYTES[piece.format.dtype]

    def lead(self, segment: PieceSegment) -> int:
        """Remainder (int16) or master (fp32) of a segment; 0 when the layout has neither."""
        return self._base + lead_offset(self._piece, segment) if _LEAD_BYTES[self._piece.kind] else 0

    def array(self, field: str, segment: PieceSegment) -> int:
        """Address of a segment in one of the piece's arrays, or (``exp_avg_absmax`` ...) of its scales."""
        return self._base + array_offset(self._piece, field, segment)

    def fill(self, field: str, segment: PieceSegment, value: float) -> None:
        """Set a segment of an array, or its scales, to one value; other values than zero are for fp32 arrays."""
        address = self.array(field, segment)
        if value:
            with outside_user_modes():
                values_at(address, segment.numel, torch.float32).fill_(value)
        elif field.endswith(SCALE_SUFFIX):
            ctypes.memset(address, 0, num_blocks(segment.numel) * 4)
        else:
            ctypes.memset(address, 0, segment.numel * self._size)

    def stored(self, key: str, field: str, segment: PieceSegment) -> dict[str, Tensor]:
        """A segment of an array as it is stored, under ``key``, with its scales when it is 8-bit: flat views."""
        dtype = torch_dtype(self._dtype, field)
        with outside_user_modes():
            arrays = {key: values_at(self.array(field, segment), segment.numel, dtype)}
            if self._dtype is StateDType.EIGHT_BIT:
                scales = self.array(field + SCALE_SUFFIX, segment)
                arrays[key + SCALE_SUFFIX] = values_at(scales, num_blocks(segment.numel), torch.float32)
        return arrays

    def stored_lead(self, segment: PieceSegment) -> Tensor:
        """The remainder (int16) or master (fp32) of a segment: a flat view."""
        dtype = torch.int16 if self._piece.kind is StateLayout.SPLIT_BF16 else torch.float32
        with outside_user_modes():
            return values_at(self.lead(segment), segment.numel, dtype)

    def load_fp32(self, field: str, segment: PieceSegment, target: int) -> None:
        """Copy a segment of an array to ``target`` in fp32."""
        stored = self.stored(field, field, segment)
        to_fp32(stored[field], stored.get(field + SCALE_SUFFIX), target)

    def store_fp32(self, field: str, segment: PieceSegment, source: int) -> None:
        """Set a segment of an array to the fp32 values at ``source``."""
        address, threads = self.array(field, segment), num_threads()
        if self._dtype is StateDType.FP32:
            cpu_adam.copy(address, source, segment.numel * 4, threads)
        elif self._dtype is StateDType.EIGHT_BIT:
            scales, signed = self.array(field + SCALE_SUFFIX, segment), field in SIGNED_FIELDS
            cpu_adam.quantize(source, address, scales, segment.numel, signed=signed, num_threads=threads)
        else:
            with outside_user_modes():
                values = values_at(source, segment.numel, torch.float32)
                values_at(address, segment.numel, torch.bfloat16).copy_(values)


def to_fp32(stored: Tensor, scales: Tensor | None, target: int) -> None:
    """Put the values that stored ones stand for (see :meth:`PieceView.stored`) at an address, in fp32."""
    if scales is not None:
        signed = stored.dtype is torch.int8
        cpu_adam.dequantize(
            stored.data_ptr(), scales.data_ptr(), target, stored.numel(), signed=signed, num_threads=num_threads()
        )
    elif stored.dtype is torch.float32:
        cpu_adam.copy(target, stored.data_ptr(), stored.nbytes, num_threads())
    else:
        with outside_user_modes():
            values_at(target, stored.numel(), torch.float32).copy_(stored)


def ranges_of(segment: Segment, state_dtype: StateDType) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of what an update of a segment writes."""
    sizes = {"weight": 4 if segment.weight_dtype is DType.FP32 else 2, "remainder": 2, "master": 4}
    for field in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        sizes[field] = _ARRAY_BYTES[state_dtype]
    for field, size in sizes.items():
        if address := getattr(segment, field):
            yield address, size * segment.numel
    for address in (segment.exp_avg_absmax, segment.exp_avg_sq_absmax):
        if address:
            yield address, 4 * num_blocks(segment.numel)


def values_at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A flat view of memory."""
    return torch.frombuffer((ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


def follow_weight(tiers: TierManager, piece: StatePiece, segment: PieceSegment, handle: ParamHandle) -> None:
    """Make the fp32 master the exact value of the weight, which the program has set. Both blocks must be resident."""
    view = PieceView(tiers, piece)
    if piece.kind is StateLayout.SPLIT_BF16:
        ctypes.memset(view.lead(segment), 0, segment.numel * 2)
    elif piece.kind is StateLayout.MASTER:
        with outside_user_modes():
            buffer, base = tiers.arena.buffer, tiers.arena.address
            source = handle.element_address(segment.start) - base
            weight = torch.frombuffer(buffer, dtype=handle.dtype, count=segment.numel, offset=source)
            target = view.lead(segment) - base
            torch.frombuffer(buffer, dtype=torch.float32, count=segment.numel, offset=target).copy_(weight)


def whole_segment(piece: PieceLayout, tensor: int) -> list[PieceSegment]:
    """The runs of one tensor's elements in a piece."""
    return [segment for segment in piece.segments if segment.tensor == tensor]
