"""Pieces of optimizer state that an optimizer needs in another format: laid out again, with what they hold.

Pieces are planned when the model is built, for two fp32 arrays. The first step of an optimizer with other needs (8-bit
or bf16 moments, amsgrad's third array, Lion's single one) comes here once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack

import torch

from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.cpu_adam import STATE_BLOCK, StateLayout
from deepoffload.optim.eight_bit import CHUNK_NUMEL
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.state import LAYOUTS, PieceView, lead_bytes, make_pieces
from deepoffload.params.layout import PieceSegment
from deepoffload.params.unit import ParamHandle, StateFormat, StatePiece, Unit


def fit_pieces(tiers: TierManager, unit: Unit, jobs: Mapping[ParamHandle, UpdateJob]) -> None:
    """Give the parameters of a unit that ``jobs`` will update pieces in the format that their jobs need.

    To be called under the pager's lock, when the unit has no update to come. Arrays that stay are converted, new ones
    are zeros. Raises ``BudgetError`` or ``IoFailure`` with the old pieces as they were.
    """
    wanted: dict[ParamHandle, StateFormat] = {}
    for handle in unit.handles:
        job = jobs.get(handle)
        if job is not None and (job.arrays or LAYOUTS[handle.dtype] is not StateLayout.FP32):
            wanted[handle] = StateFormat(job.fields, job.state_dtype, job.whole)
    lay_out(tiers, unit, wanted, {handle for handle in unit.handles if handle in jobs and jobs[handle].first})


def add_fields(tiers: TierManager, unit: Unit, fields: Mapping[ParamHandle, tuple[str, ...]]) -> None:
    """Give parameters of a unit room for more arrays than their pieces have."""
    wanted = {}
    for handle, present in _formats(unit).items():
        more = tuple(field for field in fields.get(handle, ()) if field not in present.fields)
        if more:
            wanted[handle] = StateFormat((*present.fields, *more), present.dtype, present.whole)
    lay_out(tiers, unit, wanted)


def lay_out(
    tiers: TierManager,
    unit: Unit,
    wanted: Mapping[ParamHandle, StateFormat],
    unused: Set[ParamHandle] = frozenset(),
) -> None:
    """Lay out a unit's pieces so that each parameter in ``wanted`` has the format given there.

    Args:
        unused: parameters whose arrays hold nothing yet.
    """
    present = _formats(unit)
    changed = {h: f for h, f in wanted.items() if h in present and present[h] != f}
    if not changed:
        return
    old = [piece for piece in unit.pieces if any(handle in changed for handle in piece.handles)]
    kept = [piece for piece in unit.pieces if piece not in old]
    moved = list(dict.fromkeys(handle for piece in old for handle in piece.handles if handle in present))
    target = {handle: changed.get(handle, present[handle]) for handle in moved}
    limit_bytes = max(piece.block.nbytes for piece in old)
    stays = _everything_stays(tiers, old)
    new: list[StatePiece] = []
    for state_format in dict.fromkeys(target.values()):
        trained = [(handle, handle.dtype) for handle in moved if target[handle] == state_format]
        least_numel = max(handle.numel for handle, _ in trained) if stays and state_format.whole else 0
        new += make_pieces(
            tiers, unit, trained, limit_bytes, state_format, alignment_numel=STATE_BLOCK, least_piece_numel=least_numel
        )
    stay_bytes = _staying_bytes(tiers, old, new)
    try:
        if tiers.space is None:  # old and new ones are in memory at once
            for piece in old:
                if all(piece.handles[part.tensor] in unused for part in piece.layout.segments):
                    _drop_arrays(tiers, piece)
        for piece in new:
            _fill(tiers, piece, old)
    except BaseException:
        for piece in new:
            tiers.remove(piece.block)
        raise
    unit.pieces = [*kept, *new]
    for piece in old:
        tiers.remove(piece.block)
    _keep(tiers, new, stay_bytes)


def _formats(unit: Unit) -> dict[ParamHandle, StateFormat]:
    return {piece.handles[part.tensor]: piece.format for piece in unit.pieces for part in piece.layout.segments}


def _everything_stays(tiers: TierManager, old: list[StatePiece]) -> bool:
    """Whether nothing ever leaves memory: then pieces need not be small enough to take turns there."""
    return all(block.id in tiers.static for block in (*tiers.blocks(), *(piece.block for piece in old)))


def _staying_bytes(tiers: TierManager, old: list[StatePiece], new: list[StatePiece]) -> int:
    """As many bytes stay in memory for good as placement had decided, or as there is room for if everything stayed."""
    passing = {piece.block.id for piece in (*old, *new)}
    others = [block for block in tiers.blocks() if block.id not in passing]
    if all(block.id in tiers.static for block in (*others, *(piece.block for piece in old))):
        return tiers.arena.capacity_bytes - tiers.unowned_bytes() - sum(block.room_bytes for block in others)
    return sum(piece.block.room_bytes for piece in old if piece.block.id in tiers.static)


def _keep(tiers: TierManager, new: list[StatePiece], stay_bytes: int) -> None:
    """Let so many bytes of new pieces stay in memory for good. While they were filled any may have left it: their
    place on NVMe belongs to others now."""
    for piece in new:
        if piece.block.room_bytes <= stay_bytes:
            stay_bytes -= piece.block.room_bytes
            tiers.keep(piece.block)
            if tiers.is_away(piece.block.id):
                tiers.acquire(piece.block)
                tiers.release(piece.block)


def _drop_arrays(tiers: TierManager, piece: StatePiece) -> None:
    """Keep what completes the weights, which comes first in a piece, and give back the memory behind it."""
    left_bytes = piece.layout.numel * lead_bytes(piece.kind)
    if piece.block.resident and left_bytes:
        piece.format = StateFormat((), piece.format.dtype, piece.format.whole)
        tiers.shrink(piece.block, left_bytes)


def _fill(tiers: TierManager, piece: StatePiece, old: list[StatePiece]) -> None:
    """Copy what the old pieces hold of a new one's segments; a piece of which nothing was ever used stays empty."""
    sources = [source for source in old if tiers.has_bytes(source.block)]
    if not any(True for segment in piece.layout.segments for _ in _overlaps(piece, segment, sources)):
        return
    with ExitStack() as lease:
        tiers.acquire(piece.block)
        lease.callback(tiers.release, piece.block)
        tiers.will_change(piece.block)
        for segment in piece.layout.segments:
            for start in range(0, segment.numel, CHUNK_NUMEL):
                _copy_chunk(tiers, piece, _cut(segment, start, min(CHUNK_NUMEL, segment.numel - start)), sources)


def _cut(segment: PieceSegment, start: int, numel: int) -> PieceSegment:
    return PieceSegment(segment.tensor, segment.start + start, numel, segment.piece_start + start)


def _overlaps(
    piece: StatePiece, segment: PieceSegment, sources: list[StatePiece]
) -> Iterator[tuple[StatePiece, PieceSegment]]:
    """The parts of ``segment`` that the old pieces hold, each with the piece."""
    handle = piece.handles[segment.tensor]
    for source in sources:
        for part in source.layout.segments:
            if source.handles[part.tensor] is handle:
                begin = max(part.start, segment.start)
                end = min(part.start + part.numel, segment.start + segment.numel)
                if begin < end:
                    yield source, _cut(part, begin - part.start, end - begin)


def _copy_chunk(tiers: TierManager, piece: StatePiece, chunk: PieceSegment, sources: list[StatePiece]) -> None:
    values = {field: torch.zeros(chunk.numel, dtype=torch.float32, device="cpu") for field in piece.format.fields}
    for source, part in _overlaps(piece, chunk, sources):
        tiers.acquire(source.block)
        try:
            view, target = PieceView(tiers, source), PieceView(tiers, piece)
            offset = part.start - chunk.start
            lead = lead_bytes(piece.kind)
            if lead:
                ctypes.memmove(target.lead(chunk) + offset * lead, view.lead(part), part.numel * lead)
            for field in source.format.fields:
                if field in values:
                    view.load_fp32(field, part, values[field].data_ptr() + offset * 4)
        finally:
            tiers.release(source.block)
    target = PieceView(tiers, piece)
    for field, array in values.items():
        target.store_fp32(field, chunk, array.data_ptr())
