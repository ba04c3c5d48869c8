"""Of a table that is away, an embedding reads the rows that it looks up: for one token of a large vocabulary a page or
two in place of a gigabyte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.io.part_reads import PageRead, page_runs
from deepoffload.memory.part_reads import can_read_parts, fetch_parts
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.params.torch_private import in_functorch, outside_user_modes, past_doors, requires_grad_of
from deepoffload.params.unit import ParamHandle

ROWS_SHARE = 4
"""A table is read in rows where so many times as many rows as are looked up are no more than it has."""


def is_table(module: nn.Module) -> bool:
    """Whether a call of a module does nothing but look up rows of its weight."""
    plain = type(module) is nn.Embedding and "forward" not in module.__dict__
    return plain and module.max_norm is None and not module.sparse and module._compiled_call_impl is None


def reads_rows(handle: ParamHandle, indices: Any) -> bool:
    """Whether looking up ``indices`` in a frozen table is to read single rows."""
    block, tiers, param = handle.block, handle.pager.tiers, handle.tensor
    if block is None or param is None or type(indices) is not Tensor or not handle.pager.memory.on_host:
        return False
    dense = len(handle.shape) == 2 and handle.stride == (handle.shape[1], 1)
    if requires_grad_of(param) or handle.is_to_be_updated() or not dense:
        return False
    few = 0 < ROWS_SHARE * indices.numel() <= handle.shape[0]
    return few and block.id not in tiers.static and can_read_parts(tiers, block) and not in_functorch()


def look_up(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The door of ``F.embedding``. ``otherwise``: what runs a function for which whole tables come."""

    def embedding(func: Any, args: Any, kwargs: Any) -> Any:
        found = _look_up(func, args, kwargs)
        return otherwise(func, "embedding", (), args, kwargs) if found is None else found

    return embedding


def _look_up(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Single rows; None where the whole table is to come. The bits are the same: rows are copied."""
    indices, weight = args
    handle = getattr(weight, "_slot", None)
    if not isinstance(handle, ParamHandle) or kwargs.get("max_norm") is not None or handle.given():
        return None
    with handle.pager.lock:
        if not handle.pager.inference or not reads_rows(handle, indices):
            return None
        with outside_user_modes():
            wanted, places = torch.unique(indices, return_inverse=True)
            numbers: list[int] = wanted.tolist()
            if numbers[0] < 0 or numbers[-1] >= handle.shape[0]:
                return None  # torch's own error
            rows = _rows(handle, numbers)
    looked_up: Tensor = past_doors(func, (places, rows))
    return looked_up


def _rows(handle: ParamHandle, numbers: list[int]) -> Tensor:
    """Rows of a table, read into separate memory."""
    block, width, size = handle.block, handle.shape[1], handle.itemsize
    if block is None:
        raise RuntimeError(f"{handle.name} has no block")
    starts = [handle.form.offset_stored + number * width * size for number in numbers]
    runs = page_runs((start, width * size) for start in starts)
    memory = torch.empty(sum(end - begin for begin, end in runs) + PAGE_BYTES, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE_BYTES
    parts, at = [], {}
    for begin, end in runs:
        at[begin] = first
        parts.append(PageRead(begin, end - begin, memory.data_ptr() + first))
        first += end - begin
    fetch_parts(handle.pager.tiers, block, parts)
    found, run = [], 0
    for start in starts:
        while runs[run][1] <= start:
            run += 1
        place = at[runs[run][0]] + start - runs[run][0]
        found.append(memory[place : place + width * size])
    return torch.cat(found).view(handle.dtype).view(len(numbers), width)
