"""Of experts that are stacked in one parameter, a call reads those that tokens are routed to.

transformers stacks the experts of a layer: ``gate_up_proj`` has the shape ``[experts, ...]``. The module is called with
the experts of each token (``top_k_index``), so its window knows them before anything is computed. Two ways in which
transformers computes (``batched_mm`` and ``grouped_mm``) touch no other expert. Then the block gets memory, but of the
others nothing is read; after the call the memory is given back. Until a call needs most experts again, such a block is
not fetched ahead: the order of uses is learned from other passes (a prompt's), too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.io.part_reads import PageRead, page_runs
from deepoffload.memory.part_reads import can_read_parts, fetch_parts
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit

_ROUTED = ("batched_mm", "grouped_mm")
ROUTED_SHARE = 2
"""Single experts are read where so many times as many as are needed are no more than there are."""


def num_experts(module: nn.Module) -> int:
    """How many experts transformers has stacked in the parameters of a module; 0 for any other module."""
    config, number = getattr(module, "config", None), getattr(module, "num_experts", None)
    if not isinstance(number, int) or not hasattr(module, "_is_expert_parallel"):
        return 0
    params = list(module.parameters())
    stacked = params and all(param.dim() >= 2 and param.shape[0] == number for param in params)
    return number if stacked and getattr(config, "_experts_implementation", None) in _ROUTED else 0


def has_experts(module: nn.Module) -> bool:
    return num_experts(module) > 0


def experts_of_call(module: nn.Module, units: Sequence[Unit], args: Any) -> list[int] | None:
    """The experts that a call needs, where reading these alone is worth it; None: all of them."""
    number = num_experts(module)
    if not number or len(args) != 3 or type(args[1]) is not Tensor or args[1].is_floating_point():
        return None
    handles = [handle for unit in units for handle in unit.handles]
    if {id(handle.tensor) for handle in handles} != {id(param) for param in module.parameters()}:
        return None
    pager = handles[0].pager
    if all(unit.weights.id in pager.tiers.static for unit in units):
        return None
    with outside_user_modes():
        experts: list[int] = torch.unique(args[1].detach()).tolist()
    within = bool(experts) and experts[0] >= 0 and experts[-1] < number
    few = within and ROUTED_SHARE * len(experts) <= number
    blocks = {unit.weights.id for unit in units}
    if few:
        pager.routed |= blocks
    else:
        pager.routed -= blocks
    return experts if few and _can_come_in_parts(units, handles, number) else None


def _can_come_in_parts(units: Sequence[Unit], handles: Sequence[ParamHandle], number: int) -> bool:
    tiers = handles[0].pager.tiers
    for unit in units:
        if unit.weights.id in tiers.static or not can_read_parts(tiers, unit.weights) or unit.pending is not None:
            return False
    whole = any(h.given() or h.stride[0] != h.numel // number for h in handles)
    return handles[0].pager.memory.on_host and not whole


def bring_experts(unit: Unit, experts: Sequence[int]) -> None:
    """Lease the unit's memory, with the bytes of some experts only: the rest of it means nothing."""
    tiers, block = unit.handles[0].pager.tiers, unit.weights
    extent = block.extent
    if extent is None:
        raise RuntimeError(f"{unit.name} is on no disk")
    tiers.acquire(block, load=False)
    unit.handles[0].pager.partial.add(block.id)
    try:
        ranges = []
        for handle in unit.handles:
            nbytes = handle.nbytes // handle.shape[0]
            ranges += [(handle.form.offset_stored + expert * nbytes, nbytes) for expert in experts]
        address = tiers.address(block)
        if tiers.poison:
            ctypes.memset(address, 0xFF, block.nbytes)
        fetch_parts(tiers, block, [PageRead(start, end - start, address + start) for start, end in page_runs(ranges)])
    except BaseException:
        _away_again(unit)
        raise


def drop_experts(unit: Unit, changed: Sequence[ParamHandle]) -> None:
    """Give back what :func:`bring_experts` has brought.

    Raises:
        UnsupportedError: the program wrote to the weights in the call; of most of them it had nothing.
    """
    _away_again(unit)
    if changed:
        names = ", ".join(handle.name for handle in changed)
        raise UnsupportedError(
            f"{names}: stacked experts were changed inside the call of their own module, of which only the routed ones "
            "were read; the change is lost. Change them outside of the call"
        )


def _away_again(unit: Unit) -> None:
    tiers, block = unit.handles[0].pager.tiers, unit.weights
    unit.handles[0].pager.partial.discard(block.id)
    tiers.release(block)
    if not block.leases:
        extent = block.extent
        tiers.discard(block)
        if extent is not None:
            tiers.transfers.back(block, extent)
