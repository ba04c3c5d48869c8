"""The files ``optimizer-*.safetensors``: arrays of optimizer state as they are in their pieces.

An array is called ``<parameter>.<key>``, with the optimizer's key: ``exp_avg``, ``momentum_buffer``. What completes a
16-bit weight to its fp32 master is ``<parameter>.remainder`` (bf16) or ``<parameter>.master`` (fp16). 8-bit codes have
their scales next to them under ``<key>_absmax``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.checkpoint.cut import BlockSpan, CutContent
from deepoffload.checkpoint.file_layout import OPTIMIZER_FILE, PlannedFile, PlannedTensor
from deepoffload.checkpoint.safetensors_file import check_dtype
from deepoffload.checkpoint.tile_places import StoredPlace, StoredPlaces
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.native.cpu_adam import STATE_BLOCK, StateDType
from deepoffload.optim.eight_bit import num_blocks, torch_dtype
from deepoffload.optim.foreign.packed import is_packed_key
from deepoffload.optim.optimizer_parts import OptimizerParts
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS, array_offset, lead_bytes, lead_offset
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, StatePiece


class _ArrayPlace(NamedTuple):
    file: str
    begin: int
    itemsize: int
    numel_per_item: int


@dataclass
class StatePlan:
    """Which arrays there are and where they go.

    Attributes:
        files: in order, with their tensors.
    """

    files: list[PlannedFile] = field(default_factory=list)
    _held: dict[ParamHandle, Mapping[str, str]] = field(default_factory=dict)
    _leads: set[ParamHandle] = field(default_factory=set)
    _places: dict[ParamHandle, StoredPlace] = field(default_factory=dict)
    _in_memory: list[tuple[str, int, Tensor]] = field(default_factory=list)
    _pagers: Sequence[Pager] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def add_to(self, content: CutContent, *, with_ordinary: bool = True) -> None:
        """Say which bytes go where. ``with_ordinary``: False: another rank writes what lies in no piece."""
        places = {
            name: _ArrayPlace(
                file.name, begin, tensor.dtype.itemsize, STATE_BLOCK if name.endswith(SCALE_SUFFIX) else 1
            )
            for file in self.files
            for name, (tensor, begin) in file.places().items()
        }
        for pager in self._pagers:
            for unit in list(pager.units):
                for piece in unit.pieces:
                    for part in piece.layout.segments:
                        of_param = self._places.get(piece.handles[part.tensor])
                        if of_param is None:
                            continue
                        for key, offset, nbytes in self._runs(piece, part):
                            place = places[f"{of_param.name}.{key}"]
                            first = of_param.start + part.start
                            position = place.begin + first // place.numel_per_item * place.itemsize
                            content.add_span(piece.block, BlockSpan(offset, nbytes, place.file, position))
        for name, first, tensor in self._in_memory if with_ordinary else ():
            content.add_tensor(places[name].file, places[name].begin + first * tensor.itemsize, tensor.detach())

    def _runs(self, piece: StatePiece, part: PieceSegment) -> Iterator[tuple[str, int, int]]:
        """What is stored of a run of a parameter: keys, and where in the piece's block their bytes lie."""
        handle, dtype = piece.handles[part.tensor], piece.format.dtype
        if handle in self._leads:
            yield MASTER_PART_KEYS[piece.kind], lead_offset(piece, part), part.numel * lead_bytes(piece.kind)
        for key, array in self._held.get(handle, {}).items():
            if array in piece.format.fields:
                yield key, array_offset(piece, array, part), part.numel * torch_dtype(dtype, array).itemsize
                if dtype is StateDType.EIGHT_BIT:
                    scales = array_offset(piece, array + SCALE_SUFFIX, part)
                    yield key + SCALE_SUFFIX, scales, num_blocks(part.numel) * 4


class HeldArrays(NamedTuple):
    """What the pieces of a parameter hold; those of one rank, or of all.

    Attributes:
        fields: of the arrays, by the optimizer's keys.
        dtype: how they are stored.
        has_lead: whether what completes the weight to its master is there and right.
    """

    fields: Mapping[str, str]
    dtype: StateDType
    has_lead: bool


Held = Mapping[str, HeldArrays]
"""By the name of the parameter."""


def held_arrays(names: Mapping[int, str], pagers: Sequence[Pager], parts: OptimizerParts | None) -> Held:
    """What the pieces hold here. Inside :func:`~deepoffload.checkpoint.cut.held_still`.

    Args:
        names: of parameters, by ``id``.
        parts: None where there is no optimizer: what completes weights is stored all the same.
    """
    found = {}
    for pager in pagers:
        for handle, pieces in _by_handle(pager):
            param = handle.tensor
            if param is None or id(param) not in names:
                continue
            held = {} if parts is None else parts.in_pieces.get(handle, {})
            present = pieces[0].format
            has_lead = pieces[0].kind in MASTER_PART_KEYS and not handle.master_stale
            found[names[id(param)]] = HeldArrays(
                {key: field for key, field in held.items() if field in present.fields},
                present.dtype,
                has_lead and any(_has_bytes(pager, piece) for piece in pieces),
            )
    return found


def of_all(everybody: Sequence[Held]) -> Held:
    """What the pieces of all ranks hold: each has some of a parameter's elements, or none.

    Raises:
        UsageError: they hold it in different ways.
    """
    found: dict[str, HeldArrays] = {}
    for rank, held in enumerate(everybody):
        for name, mine in held.items():
            known = found.setdefault(name, mine)
            if (known.fields, known.dtype) != (mine.fields, mine.dtype):
                raise UsageError(f"rank {rank} keeps other optimizer state of {name} than the ranks before it")
            found[name] = known._replace(has_lead=known.has_lead or mine.has_lead)
    return found


def plan_state(
    names: Mapping[int, str],
    places: StoredPlaces,
    pagers: Sequence[Pager],
    parts: OptimizerParts | None,
    shard_bytes: int,
    held: Held | None = None,
) -> StatePlan:
    """Find out what is there. Moves no bytes. Inside :func:`~deepoffload.checkpoint.cut.held_still`.

    Args:
        names, parts: as :func:`held_arrays` has them. places: where each parameter is stored.
        held: what all ranks hold; not said: what is here.
    """
    plan = StatePlan(_pagers=pagers)
    layers = _StoredLayers(places)
    held = held_arrays(names, pagers, parts) if held is None else held
    for pager in pagers:
        for handle in _in_order(pager):
            param = handle.tensor
            name = "" if param is None else names.get(id(param), "")
            if name not in held:
                continue
            layers.add(places[id(param)], list(_of_parameter(plan, places[id(param)], handle, held[name])))
    if parts is not None:
        for param, state in parts.in_memory.items():
            place = places[id(param)]
            arrays = {key: value for key, value in state.items() if is_array(value)}
            layers.add(
                place, [_of_memory(plan, place, param, key, value) for key, value in arrays.items()], in_memory=True
            )
    plan.files = in_shards(layers.tensors(), shard_bytes)
    return plan


class _StoredLayers:
    """What is stored of each parameter; the tiles of a layer are one."""

    def __init__(self, places: StoredPlaces) -> None:
        self._tiles = Counter(place.name for place in places.values())
        self._found: dict[tuple[str, bool], tuple[list[PlannedTensor], int]] = {}

    def add(self, place: StoredPlace, tensors: list[PlannedTensor], *, in_memory: bool = False) -> None:
        """Of a parameter, or of a tile. ``in_memory``: what lies in no piece.

        Raises:
            UnsupportedError: the tiles of a layer hold different things.
        """
        if tensors:
            known, count = self._found.get((place.name, in_memory), (tensors, 0))
            self._found[place.name, in_memory] = known, count + 1
            if known != tensors:
                self._refuse(place.name)

    def tensors(self) -> list[list[PlannedTensor]]:
        """In the order of parameters. Raises as :meth:`add`."""
        for (name, _), (_, count) in self._found.items():
            if count != self._tiles[name]:
                self._refuse(name)
        return [tensors for tensors, _ in self._found.values()]

    def _refuse(self, name: str) -> None:
        raise UnsupportedError(
            f"the tiles of {name} hold different optimizer state, because some have made other steps or were written "
            "to: save after a step that all of them make"
        )


def is_array(value: object) -> bool:
    """Whether an entry of ``optimizer.state`` goes into these files; the rest is small."""
    return type(value) is Tensor and value.dim() > 0


def _by_handle(pager: Pager) -> Iterator[tuple[ParamHandle, list[StatePiece]]]:
    """Parameters in the order of their units."""
    for unit in list(pager.units):
        pieces: dict[ParamHandle, list[StatePiece]] = {}
        for piece in unit.pieces:
            for part in piece.layout.segments:
                pieces.setdefault(piece.handles[part.tensor], []).append(piece)
        yield from pieces.items()


def _in_order(pager: Pager) -> Iterator[ParamHandle]:
    """Parameters in the order of their units and pieces; with several ranks in that which one would have."""
    if pager.link is None:
        yield from (handle for handle, _ in _by_handle(pager))
        return
    for unit in list(pager.units):
        for dtype in LAYOUTS:
            yield from (handle for handle in unit.handles if handle.dtype is dtype)


def _of_parameter(
    plan: StatePlan, place: StoredPlace, handle: ParamHandle, held: HeldArrays
) -> Iterator[PlannedTensor]:
    """What is stored of it; of a tile, the arrays of its whole layer."""
    is_tile = place.shape != tuple(handle.shape)
    order = memory_order(handle.shape, handle.stride)
    plan._places[handle] = place
    lead = MASTER_PART_KEYS.get(LAYOUTS[handle.dtype])
    if lead is not None and held.has_lead:
        plan._leads.add(handle)
        dtype = torch.int16 if lead == "remainder" else torch.float32
        yield PlannedTensor(f"{place.name}.{lead}", dtype, place.shape, order)
    if held.fields:
        plan._held[handle] = held.fields
    for key, array in held.fields.items():
        if is_tile and is_packed_key(key):
            raise UnsupportedError(
                f"{place.name} is split into tiles, and the optimizer keeps tensors of other shapes than a tile's for "
                "each: they cannot be stored under the layer's name; use another optimizer, or leave this layer whole"
            )
        yield PlannedTensor(f"{place.name}.{key}", torch_dtype(held.dtype, array), place.shape, order)
        if held.dtype is StateDType.EIGHT_BIT:
            scales = key + SCALE_SUFFIX
            place.start_of(scales, is_tile=is_tile)
            yield PlannedTensor(f"{place.name}.{scales}", torch.float32, place.shape_of(scales), None)


def _has_bytes(pager: Pager, piece: StatePiece) -> bool:
    return pager.tiers.has_bytes(piece.block) or pager.memory.keeps(piece.block)


def _of_memory(plan: StatePlan, place: StoredPlace, param: Tensor, key: str, value: Tensor) -> PlannedTensor:
    full, shape, first = f"{place.name}.{key}", tuple(value.shape), 0
    if not isinstance(key, str) or "." in key:
        raise UnsupportedError(
            f"the optimizer's state of {place.name} has the key {key!r}; a checkpoint holds names without dots"
        )
    check_dtype(full, value.dtype)
    if place.shape != tuple(param.shape):
        shape, first = place.shape_of(key), place.start_of(key, is_tile=True)
        if not key.endswith(SCALE_SUFFIX) and value.shape != param.shape:
            raise UnsupportedError(
                f"{full} of a tile has shape {tuple(value.shape)}: only state that has the tile's own shape can be "
                "stored under the layer's name; use another optimizer, or leave this layer whole"
            )
    plan._in_memory.append((full, first, value))
    return PlannedTensor(full, value.dtype, shape, None)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor from the slowest to the fastest; None where that is their own order."""
    with_extent = [dim for dim in range(len(shape)) if shape[dim] != 1]
    by_stride = sorted(with_extent, key=lambda dim: -stride[dim])
    if by_stride == with_extent:
        return None
    return (*(dim for dim in range(len(shape)) if shape[dim] == 1), *by_stride)


def in_shards(tensors: list[list[PlannedTensor]], shard_bytes: int) -> list[PlannedFile]:
    """Parameters in order, each with all of its arrays in one file."""
    shards: list[list[PlannedTensor]] = []
    filled = 0
    for mine in tensors:
        nbytes = sum(tensor.nbytes for tensor in mine)
        if not shards or filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += mine
        filled += nbytes
    return [
        PlannedFile(OPTIMIZER_FILE.format(number, len(shards)), shard, {"format": "pt"})
        for number, shard in enumerate(shards, 1)
    ]
