"""One sentence that says what to do, from the same numbers as the table."""

from __future__ import annotations

from deepoffload.config.resolve import least_free_bytes, may_use_nvme
from deepoffload.config.units import at_least, at_most, format_bytes
from deepoffload.estimate.questions import Estimate

_LESS_BESIDE = "smaller batches or sequences, or activation checkpointing"


def advice(found: Estimate) -> str:
    """What to do with this model on this machine."""
    if found.fits:
        return _fits(found)
    if found.smallest_bytes is None:
        return "Let offload_param and offload_optimizer go to NVMe: with what they keep in memory no budget is enough."
    memory = _memory_for(found, found.smallest_bytes)
    smallest, room = found.of_node(found.smallest_bytes), found.of_node(found.room_bytes)
    if room == 0:
        return f"Use {_LESS_BESIDE}, or a machine with at least {memory} of host memory."
    if found.device_enough_bytes is not None:
        budget = at_least(found.device_enough_bytes * found.machine.ranks_per_device)
        return f"Give it a device_budget of at least {budget}, on a device that has as much."
    disk = _disk(found)
    if smallest > room:
        more = f"Use a machine with at least {memory} of host memory"
        if disk:
            return f"{more}, or {disk}."
        limits = f"the least budget is {at_least(smallest)}, and there is room for {at_most(room)}"
        return f"{more}, or {_LESS_BESIDE}: {limits}."
    if found.of_node(found.capacity_bytes) < smallest:
        enough = f"host_budget of at least {at_least(smallest)} (there is room for {at_most(room)})"
        return f"Give it a {enough}, or {disk}." if disk else f"Give it a {enough}."
    if found.of_node(found.capacity_bytes) > room:
        return (
            f"Give it a host_budget from {at_least(smallest)} to {at_most(room)}, so that activations have room, too."
        )
    return f"Use {_LESS_BESIDE}, or a device with more memory: {found.problem.splitlines()[0]}."


def _fits(found: Estimate) -> str:
    smallest, room = found.smallest_bytes or 0, found.room_bytes
    if found.blocks is not None and not found.blocks.placement.paged:
        return "Train it as it is: everything stays in memory."
    said = "as said" if found.config.host_budget is not None else "which is what the engine takes by itself"
    if room <= found.capacity_bytes:
        return f"Train it with a host_budget of {format_bytes(found.of_node(found.capacity_bytes))}, {said}."
    most = found.of_node(min(room, found.whole_bytes))
    works = f"from {at_least(found.of_node(smallest))} to {at_most(most)}"
    budget = format_bytes(found.of_node(found.capacity_bytes))
    return f"Train it with a host_budget of {budget}, {said}; anything {works} works, and more is faster."


def _disk(found: Estimate) -> str:
    """The NVMe with which it fits, and the budget where that is another one; "" where NVMe is no way out."""
    way = found.with_disk
    if way is None:
        return ""
    needed, said = at_least(found.of_node(way.nvme_bytes)), format_bytes(found.of_node(way.budget_bytes))
    budget = "" if way.budget_bytes == found.capacity_bytes else f" and host_budget = {said}"
    if not found.machine.nvme_bytes:
        free = at_least(least_free_bytes(found.of_node(way.nvme_bytes)))
        return f"a disk with {free} free{budget}: try it with --measure DIRECTORY, and train with nvme_path"
    if not may_use_nvme(found.config):
        return f"let it use {needed} of the disk (nvme_budget, offload_param and offload_optimizer){budget}"
    return f"more NVMe: {needed} for it instead of {format_bytes(found.of_node(found.nvme_bytes or 0))}{budget}"


def _memory_for(found: Estimate, budget: int) -> str:
    """Host memory of a node in which such a budget has room."""
    others = found.machine.host_memory_bytes // found.machine.ranks_per_node - found.room_bytes
    return at_least(found.of_node(others + budget))
