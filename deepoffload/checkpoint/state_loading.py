"""Puts stored optimizer state into the pieces of paged parameters, and exact masters into weights of another type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepoffload.checkpoint.block_reader import FileSpan, ReadsAhead
from deepoffload.checkpoint.own_ranges import changing_shard, owned_run
from deepoffload.checkpoint.stored_param import LEADS, StoredParam
from deepoffload.checkpoint.weights import WeightOpener, discard_replaced
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK, StateDType
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.eight_bit import num_blocks, torch_dtype
from deepoffload.optim.optimizer_parts import PieceNeeds, now_in_pieces
from deepoffload.optim.paged_state import in_turn, pieces_of, resident_piece
from deepoffload.optim.rank_state import has_state
from deepoffload.optim.relayout import lay_out
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS, PieceView, ensure_pieces
from deepoffload.optim.threads import num_threads
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StatePiece

CHUNK_NUMEL = 1 << 18
"""Elements that are converted at a time; a multiple of the block of 8-bit state. 1 MiB in fp32: of so much the system's
allocator keeps little when it is given back."""


@dataclass(frozen=True)
class PieceLoader:
    """What goes into the pieces of one pager.

    Attributes:
        stored: parameters of which the checkpoint has something.
        needs: what the optimizer wants of them.
        optimizer: whose arrays are loaded; None: those in the pieces stay as they are.
    """

    pager: Pager
    stored: Mapping[ParamHandle, StoredParam]
    needs: Mapping[ParamHandle, PieceNeeds]
    optimizer: HostOptimizer | None

    def load(self, reader: ReadsAhead) -> None:
        """Read everything into its place.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed. A part is loaded then.
        """
        self._correct_weights(reader)
        self._make_pieces()
        reader.will_read(self._spans())
        for piece, parts in in_turn(self.pager, self.stored.keys()):
            if not any(list(self._jobs(piece, part)) for part in parts):
                continue
            with resident_piece(self.pager, piece, load=not self._fills(piece, parts)):
                self.pager.tiers.will_change(piece.block)
                view = PieceView(self.pager.tiers, piece)
                for part in parts:
                    for key, field in self._jobs(piece, part):
                        self._fill(view, piece, part, key, field)
        for handle, stored in self.stored.items():
            stored.forget()
            if self._lead_of(handle) is not None:
                handle.master_stale = False
            if self.optimizer is not None and self._arrays(handle):
                now_in_pieces(self.optimizer, handle)

    # -- what there is ---------------------------------------------------------------------------------------------

    def _arrays(self, handle: ParamHandle) -> Mapping[str, str]:
        """Stored arrays that go into pieces, with their fields."""
        if self.optimizer is None or handle not in self.needs:
            return {}
        stored = self.stored[handle]
        return {key: field for key, field in self.needs[handle].arrays.items() if key in stored.arrays}

    def _lead_of(self, handle: ParamHandle) -> str | None:
        """How the pieces of a parameter complete its weight, where the checkpoint says anything of that."""
        lead = MASTER_PART_KEYS.get(LAYOUTS[handle.dtype]) if handle.dtype in LAYOUTS else None
        stored = self.stored[handle]
        if lead is None or stored.weight_dtype is None or not has_state(handle):
            return None
        known = lead in stored.arrays if stored.weight_dtype is handle.dtype else _is_finer(stored, handle.dtype)
        return lead if known else None

    def _jobs(self, piece: StatePiece, part: PieceSegment) -> Iterator[tuple[str, str]]:
        """The keys and fields of a run that the checkpoint fills; a lead has no field."""
        handle = piece.handles[part.tensor]
        lead = self._lead_of(handle)
        if lead is not None:
            yield lead, ""
        yield from self._arrays(handle).items()

    def _fills(self, piece: StatePiece, parts: Sequence[PieceSegment]) -> bool:
        """Whether the checkpoint has every byte of a piece."""
        wanted = {*piece.format.fields, *([""] if piece.kind in MASTER_PART_KEYS else [])}
        return sum(part.numel for part in parts) == piece.layout.numel and all(
            {field for _, field in self._jobs(piece, part)} == wanted for part in parts
        )

    def _spans(self) -> Iterator[FileSpan]:
        """What is going to be read, in this order."""
        for piece, parts in pieces_of(self.pager, self.stored.keys()):
            for part in parts:
                stored = self.stored[piece.handles[part.tensor]]
                for key, field in self._jobs(piece, part):
                    array = stored.arrays.get(key)
                    if array is None or not stored.lies_as_stored(key):
                        continue
                    yield array.span(part.start, part.numel)
                    if field and key + SCALE_SUFFIX in stored.arrays:
                        scales = stored.arrays[key + SCALE_SUFFIX]
                        yield scales.span(part.start // STATE_BLOCK, num_blocks(part.numel))

    # -- making room -----------------------------------------------------------------------------------------------

    def _make_pieces(self) -> None:
        """Pieces in the format that the optimizer wants; where nothing that they hold is kept, they are emptied
        first, so that nothing is read or converted for that."""
        for handle, stored in self.stored.items():
            if handle.unit is not None and handle.dtype in LAYOUTS and (self._arrays(handle) or stored.arrays):
                tensor = handle.tensor
                if self._arrays(handle) or (tensor is not None and tensor.requires_grad):
                    ensure_pieces(self.pager.tiers, handle)
        for unit in list(self.pager.units):
            holders = {piece.handles[part.tensor] for piece in unit.pieces for part in piece.layout.segments}
            if not holders & self.stored.keys():
                continue
            whole = self.optimizer is not None and holders <= self.stored.keys() and holders <= self.needs.keys()
            wanted = {handle: self.needs[handle].format for handle in unit.handles if self._has_arrays(handle)}
            with self.pager.lock:
                if whole:
                    for piece in unit.pieces:
                        self.pager.tiers.discard(piece.block)
                lay_out(self.pager.tiers, unit, wanted, holders if whole else frozenset())

    def _has_arrays(self, handle: ParamHandle) -> bool:
        return handle in self.stored and bool(self._arrays(handle))

    # -- filling ---------------------------------------------------------------------------------------------------

    def _fill(self, view: PieceView, piece: StatePiece, part: PieceSegment, key: str, field: str) -> None:
        handle = piece.handles[part.tensor]
        stored = self.stored[handle]
        if not field:
            self._fill_lead(view, part, handle, stored, key)
            return
        array = stored.arrays[key]
        eight_bit = key + SCALE_SUFFIX in stored.arrays
        same = array.dtype is torch_dtype(piece.format.dtype, field) and eight_bit is (
            piece.format.dtype is StateDType.EIGHT_BIT
        )
        if same and stored.lies_as_stored(key) and (not eight_bit or part.start % STATE_BLOCK == 0):
            array.read_into(view.array(field, part), part.start, part.numel)
            if eight_bit:
                scales = view.array(field + SCALE_SUFFIX, part)
                first, blocks = part.start // STATE_BLOCK, num_blocks(part.numel)
                stored.arrays[key + SCALE_SUFFIX].read_into(scales, first, blocks)
            return
        for chunk in _chunks(part):
            values = stored.fp32(key, chunk.start, chunk.numel)  # held until its bytes are there
            view.store_fp32(field, chunk, values.data_ptr())

    def _fill_lead(
        self, view: PieceView, part: PieceSegment, handle: ParamHandle, stored: StoredParam, lead: str
    ) -> None:
        if stored.weight_dtype is handle.dtype and stored.lies_as_stored(lead):
            stored.arrays[lead].read_into(view.lead(part), part.start, part.numel)
            return
        for chunk in _chunks(part):
            target = view.stored_lead(chunk)
            if stored.weight_dtype is handle.dtype and lead == "remainder":
                target.copy_(stored.remainder(chunk.start, chunk.numel))
            elif lead == "remainder":
                _split(stored.master(chunk.start, chunk.numel), None, target)
            else:
                target.copy_(stored.master(chunk.start, chunk.numel))

    def _correct_weights(self, reader: ReadsAhead) -> None:
        """Weights that were saved in another type become what the checkpoint's finer masters give."""
        corrected = [
            (param, handle, stored)
            for handle, stored in self.stored.items()
            if (param := handle.tensor) is not None and stored.corrects(handle.dtype)
        ]
        discard_replaced({handle: handle.numel for _, handle, _ in corrected})
        reader.will_read(
            span
            for _, handle, stored in corrected
            for start, numel in _own_runs(handle)
            for span in stored.weight_spans(start, numel)
        )
        opener = WeightOpener(to_write=True)
        opened = [(opener.opener_of(param), handle, stored) for param, handle, stored in corrected]
        for opened_weight, handle, stored in opened:
            if handle.cut is not None:
                self._correct_owned(handle, stored)
                continue
            with opened_weight() as data:
                flat = data.as_strided((handle.numel,), (1,), data.storage_offset())
                for start, numel in _runs(handle.numel):
                    flat[start : start + numel].copy_(rounded(stored.master(start, numel), handle.dtype))

    @staticmethod
    def _correct_owned(handle: ParamHandle, stored: StoredParam) -> None:
        """The same of what this rank owns of a weight that is cut."""
        owned = owned_run(handle)
        with changing_shard(handle, owned) as shard:
            if shard is not None and owned is not None:
                for start, numel in _own_runs(handle):
                    values = rounded(stored.master(start, numel), handle.dtype)
                    shard[start - owned.start : start - owned.start + numel].copy_(values)


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a master."""
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    weight = torch.empty(master.shape, dtype=dtype, device="cpu")
    _split(master, weight, None)
    return weight


def _split(master: Tensor, weight: Tensor | None, remainder: Tensor | None) -> None:
    """A master as a bf16 weight and its remainder; either may be left out."""
    master = master.contiguous()
    high = torch.empty(master.shape, dtype=torch.bfloat16, device="cpu") if weight is None else weight
    low = torch.empty(master.shape, dtype=torch.int16, device="cpu") if remainder is None else remainder
    if master.numel():
        cpu_adam.split_fp32(
            master.data_ptr(), high.data_ptr(), low.data_ptr(), master.numel(), num_threads=num_threads()
        )


def split_master(master: Tensor) -> Tensor:
    """The remainder of a master whose weight is bf16."""
    remainder = torch.empty(master.shape, dtype=torch.int16, device="cpu")
    _split(master, None, remainder)
    return remainder


def _is_finer(stored: StoredParam, dtype: torch.dtype) -> bool:
    """Whether the saved values need more than a weight of ``dtype``."""
    if LEADS & stored.arrays.keys():
        return True
    return stored.weight_dtype is torch.float32 or dtype is torch.float16 or stored.weight_dtype is torch.float16


def _chunks(part: PieceSegment) -> Iterator[PieceSegment]:
    for start, numel in _runs(part.numel):
        yield PieceSegment(part.tensor, part.start + start, numel, part.piece_start + start)


def _own_runs(handle: ParamHandle) -> Iterator[tuple[int, int]]:
    """What this process stores of a weight, as starts and lengths of what is converted at a time."""
    owned = None if handle.cut is None else owned_run(handle)
    first, count = (0, handle.numel) if handle.cut is None else (0, 0) if owned is None else (owned.start, owned.numel)
    for start, numel in _runs(count):
        yield first + start, numel


def _runs(numel: int) -> Iterator[tuple[int, int]]:
    """Starts and lengths of what is converted at a time."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, min(CHUNK_NUMEL, numel - start)
