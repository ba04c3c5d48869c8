"""What the record of a durable step says, next to its extents: which tensor lies where, and all values.

Weights and optimizer state of paged parameters lie in the extents of their blocks, as they are. Everything else that
has elements (buffers, ordinary parameters with their state, tensors of the program's) is written to separate extents.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES, check_dtype
from deepoffload.checkpoint.several_ranks import link_of
from deepoffload.checkpoint.state_files import is_array, memory_order
from deepoffload.checkpoint.values import encode
from deepoffload.checkpoint.weights import handle_of, named_values
from deepoffload.io.extents import Extent
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.committed import CommittedBlock
from deepoffload.native.aio import HostMapping
from deepoffload.native.cpu_adam import STATE_BLOCK, StateDType
from deepoffload.optim.eight_bit import num_blocks, torch_dtype
from deepoffload.optim.optimizer_parts import OptimizerParts
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS, array_offset, lead_offset
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.durability import UnitCut

FORMAT_NAME = "deepoffload durable step"
FORMAT_VERSION = 1
ZEROS = -1
"""The number of an extent that was never written, because all in it is zero."""

ASIDE_BYTES = 4 << 20
"""Tensors that lie in no block are written in extents of this size, so that nothing in memory grows with them."""

_Numbers = Mapping[CommittedBlock, int]

Run = tuple[int, int, int]
"""A number of an extent, an offset in it, and bytes."""


class _Aside:
    """Writes tensors one after the other to new extents."""

    def __init__(self, space: SwapSpace) -> None:
        self.extents: list[Extent] = []
        self._space = space
        self._memory: HostMapping | None = None
        self._filled = 0

    def put(self, tensor: Tensor) -> list[Run]:
        """Where it lies; extents are counted from 0."""
        values = tensor.detach().cpu().contiguous()
        runs: list[Run] = []
        at = 0
        while at < values.nbytes:
            if self._memory is None:
                self._memory = HostMapping(ASIDE_BYTES)
            part = min(values.nbytes - at, ASIDE_BYTES - self._filled)
            ctypes.memmove(self._memory.address + self._filled, values.data_ptr() + at, part)
            runs.append((len(self.extents), self._filled, part))
            self._filled, at = self._filled + part, at + part
            if self._filled == ASIDE_BYTES:
                self._write(self._memory)
        return runs

    def _write(self, memory: HostMapping) -> None:
        extent = self._space.allocate(self._filled)
        self.extents.append(extent)
        self._space.write(extent, memory.address).wait()
        self._filled = 0

    def close(self) -> None:
        """Write the rest."""
        if self._memory is not None:
            if self._filled:
                self._write(self._memory)
            self._memory.close()
            self._memory = None


class _Stored(NamedTuple):
    """A tensor and its runs; ``aside``: their numbers count the extents that were written aside.

    Attributes:
        first: with several ranks, the number of the first element that the runs have, in the order of memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    runs: list[Run]
    aside: bool = False
    first: int | None = None

    def described(self, first: int) -> dict[str, Any]:
        shift = first if self.aside else 0
        runs = [(number + shift if number >= 0 else number, offset, nbytes) for number, offset, nbytes in self.runs]
        found: dict[str, Any] = {"dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape), "runs": runs}
        if self.order is not None:
            found["order"] = list(self.order)
        if self.first is not None:
            found["first"] = self.first
        return found


class DurableContent:
    """One step; see :class:`~deepoffload.runtime.durability.StepContent`. What may change before the step is durable
    is taken when this is made.

    Args:
        parts: of the optimizer; None where there is none.
        values: everything that is no weight and no array of optimizer state.

    Raises:
        UnsupportedError: a value that a record does not hold; the message names its key.
        IoFailure: a tensor cannot be written. BudgetError: there is no room for it.
    """

    def __init__(
        self, space: SwapSpace, module: nn.Module, parts: OptimizerParts | None, values: Mapping[str, Any]
    ) -> None:
        tensors: dict[str, Tensor] = {}
        self._values = json.dumps(encode(dict(values), "commit", tensors), allow_nan=False, separators=(",", ":"))
        names = {id(param): name for name, param in module.named_parameters()}
        # By handle: with several ranks blocks outlive the model, until all ranks have given it up.
        self._names = {handle: names[id(param)] for param in module.parameters() if (handle := handle_of(param))}
        self._weights: dict[str, ParamHandle] = {}
        self._arrays = {} if parts is None else dict(parts.in_pieces)
        link = link_of(module)
        self._ranks = None if link is None else [link.ranks.rank, link.ranks.world_size]
        self._aside: dict[str, dict[str, _Stored]] = {"weights": {}, "arrays": {}, "values": {}}
        aside = _Aside(space)
        try:
            for name, value in named_values(module).items():
                handle = handle_of(value)
                if handle is not None:
                    self._weights[name] = handle
                else:
                    self._put(aside, "weights", name, value)
            for param, state in parts.in_memory.items() if parts is not None else ():
                for key, value in state.items():
                    if is_array(value):
                        self._put(aside, "arrays", f"{names[id(param)]}.{key}", value)
            for name, value in tensors.items():
                self._put(aside, "values", name, value)
            aside.close()
        except BaseException:
            for extent in aside.extents:
                space.free(extent)
            raise
        self.extents = aside.extents

    def _put(self, aside: _Aside, kind: str, name: str, value: Tensor) -> None:
        check_dtype(name, value.dtype)
        self._aside[kind][name] = _Stored(value.dtype, tuple(value.shape), None, aside.put(value), aside=True)

    def encode(self, cuts: Sequence[UnitCut], numbers: _Numbers, first: int) -> bytes:
        """For the record."""
        blocks = {number: frozen.block.name for frozen, number in numbers.items()}
        tensors = {
            "weights": {**dict(self._weights_of(cuts, numbers)), **self._aside["weights"]},
            "arrays": {**self._arrays_of(cuts, numbers), **self._aside["arrays"]},
            "values": self._aside["values"],
        }
        described = {
            kind: {name: stored.described(first) for name, stored in found.items()} for kind, found in tensors.items()
        }
        head = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            **({} if self._ranks is None else {"ranks": self._ranks}),
            "blocks": [blocks[number] for number in range(first)],
            "tensors": described,
        }
        text = json.dumps(head, ensure_ascii=True, separators=(",", ":"))
        return f'{text[:-1]},"state":{self._values}}}'.encode()

    def _weights_of(self, cuts: Sequence[UnitCut], numbers: _Numbers) -> Iterator[tuple[str, _Stored]]:
        where = {handle: numbers[cut.weights] for cut in cuts for handle in cut.unit.handles if cut.weights in numbers}
        for name, handle in self._weights.items():
            if handle in where and handle.form is not None:
                run = (where[handle], handle.form.offset_stored, handle.form.nbytes_stored)
                order = memory_order(handle.shape, handle.stride)
                runs = [run] if handle.form.nbytes_stored else []
                yield name, _Stored(handle.dtype, tuple(handle.shape), order, runs, first=_first_of(handle))

    def _arrays_of(self, cuts: Sequence[UnitCut], numbers: _Numbers) -> dict[str, _Stored]:
        found: dict[str, _Stored] = {}

        def add(handle: ParamHandle, key: str, dtype: torch.dtype, run: Run | None, is_scale: bool = False) -> None:
            name = f"{self._names[handle]}.{key}"
            if name not in found:
                order = None if is_scale else memory_order(handle.shape, handle.stride)
                shape = (num_blocks(handle.numel),) if is_scale else tuple(handle.shape)
                first = _first_of(handle)
                first = first // STATE_BLOCK if is_scale and first is not None else first
                found[name] = _Stored(dtype, shape, order, [], first=first)
            if run is not None:
                found[name].runs.append(run)

        for cut in cuts:
            for piece, frozen in cut.pieces:
                number = numbers.get(frozen, ZEROS)
                lead = MASTER_PART_KEYS.get(piece.kind)
                for part in piece.layout.segments:
                    handle = piece.handles[part.tensor]
                    if handle not in self._names:
                        continue
                    if lead is not None and handle not in cut.stale and number != ZEROS:
                        dtype = torch.int16 if lead == "remainder" else torch.float32
                        add(handle, lead, dtype, (number, lead_offset(piece, part), part.numel * dtype.itemsize))
                    for key, field in self._arrays.get(handle, {}).items():
                        if field not in piece.format.fields:
                            continue
                        dtype = torch_dtype(piece.format.dtype, field)
                        run = (number, array_offset(piece, field, part), part.numel * dtype.itemsize)
                        add(handle, key, dtype, run)
                        if piece.format.dtype is StateDType.EIGHT_BIT:
                            scales = field + SCALE_SUFFIX
                            run = (number, array_offset(piece, scales, part), num_blocks(part.numel) * 4)
                            add(handle, key + SCALE_SUFFIX, torch.float32, run, is_scale=True)
            for handle in cut.unit.handles:  # of which other ranks own everything: all ranks know the same arrays
                if handle.cut is None or handle.cut.run() is not None or handle not in self._arrays:
                    continue
                lead = MASTER_PART_KEYS.get(LAYOUTS[handle.dtype])
                if lead is not None and handle not in cut.stale:
                    add(handle, lead, torch.int16 if lead == "remainder" else torch.float32, None)
                for key in self._arrays[handle]:
                    add(handle, key, torch.float32, None)
        return found


def _first_of(handle: ParamHandle) -> int | None:
    """The first element of a weight that this rank stores; None where it stores all of it."""
    if handle.cut is None:
        return None
    run = handle.cut.run()
    return 0 if run is None else run.start
