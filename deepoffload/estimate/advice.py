"""One sentence that says what to do, from the same numbers as the table."""

from __future__ import annotations

from deepoffload.config.units import format_bytes, parse_bytes
from deepoffload.estimate.questions import Estimate

_LESS_BESIDE = "smaller batches or sequences, or activation checkpointing"


def advice(found: Estimate) -> str:
    """What to do with this model on this machine."""
    smallest, room = found.smallest_bytes, found.room_bytes
    if found.fits:
        return _fits(found)
    if smallest is None:
        return "Let offload_param and offload_optimizer go to NVMe: with what they keep in memory no budget is enough."
    memory = _memory_for(found, smallest)
    if room == 0:
        return f"Use {_LESS_BESIDE}, or a machine with at least {memory} of host memory."
    if smallest > room:
        more = f"Use a machine with at least {memory} of host memory"
        if found.whole_bytes > room and _disk_is_short(found):
            return f"{more}, or {_disk(found)}."
        return (
            f"{more}, or {_LESS_BESIDE}: the least budget is {_least(smallest)}, and there is room for {_most(room)}."
        )
    if found.capacity_bytes < smallest:
        enough = f"host_budget of at least {_least(smallest)} (there is room for {_most(room)})"
        return f"Give it a {enough}, or {_disk(found)}." if _disk_is_short(found) else f"Give it a {enough}."
    if found.capacity_bytes > room:
        return f"Give it a host_budget from {_least(smallest)} to {_most(room)}, so that activations have room, too."
    return f"Use {_LESS_BESIDE}, or a device with more memory: {found.problem.splitlines()[0]}."


def _fits(found: Estimate) -> str:
    smallest, room = found.smallest_bytes or 0, found.room_bytes
    if found.capacity_bytes >= found.whole_bytes:
        return "Train it as it is: everything stays in memory."
    said = "as said" if found.config.host_budget is not None else "which is what the engine takes by itself"
    if room <= found.capacity_bytes:
        return f"Train it with a host_budget of {format_bytes(found.capacity_bytes)}, {said}."
    works = f"from {_least(smallest)} to {_most(min(room, found.whole_bytes))}"
    budget = format_bytes(found.capacity_bytes)
    return f"Train it with a host_budget of {budget}, {said}; anything {works} works, and more is faster."


def _disk_is_short(found: Estimate) -> bool:
    return found.nvme_bytes is None or found.whole_bytes > found.nvme_bytes + found.capacity_bytes


def _disk(found: Estimate) -> str:
    """The disk that, with the memory there is, holds everything."""
    least = _least(found.whole_bytes - min(found.capacity_bytes, found.room_bytes))
    if found.nvme_bytes is None:
        return f"a disk with {least} for it (nvme_path)"
    return f"more NVMe: {least} for it instead of {format_bytes(found.nvme_bytes)}"


def _memory_for(found: Estimate, budget: int) -> str:
    """Host memory of a node in which such a budget has room."""
    machine = found.machine
    others = machine.host_memory_bytes // machine.devices_per_node - found.room_bytes
    return _least((others + budget) * machine.devices_per_node)


def _least(nbytes: int) -> str:
    """In words, rounded up: so much is enough."""
    text = format_bytes(nbytes)
    if parse_bytes(text) < nbytes:
        number, unit = text.split()
        text = f"{float(number) + 0.01:.2f} {unit}"
    return text


def _most(nbytes: int) -> str:
    """In words, rounded down: so much is not too much."""
    text = format_bytes(nbytes)
    if parse_bytes(text) > nbytes:
        number, unit = text.split()
        text = f"{float(number) - 0.01:.2f} {unit}"
    return text
