"""The one door through which tests look into an engine: where something lies inside is written here and nowhere else.

A test says what it is about, the units of a model or the blocks of its memory, and does not spell the way there. When
the inside of an engine moves, this file changes. ``tests/house`` holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.background import SaveHandle
from deepoffload.checkpoint.training_state import TrainingState
from deepoffload.copies.shown import ShownMemory
from deepoffload.io.engine import IoEngine
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.runtime.context import engine_of
from deepoffload.runtime.engine import Engine
from deepoffload.schedule.cost_model import Bandwidths
from deepoffload.timeline import Lane


def pager_of(paged: nn.Module | Engine) -> Pager:
    """Of a model or an engine, as with all others here."""
    return (paged if isinstance(paged, Engine) else engine_of(paged)).pager


def tiers_of(paged: nn.Module | Engine) -> TierManager:
    """The arena and the blocks."""
    return pager_of(paged).tiers


def shown_memory_of(paged: nn.Module | Engine) -> ShownMemory:
    """In which tensors show their bytes."""
    return pager_of(paged).memory


def units_of(paged: nn.Module | Engine) -> list[Unit]:
    """In the order in which they were found."""
    return pager_of(paged).units


def io_of(paged: nn.Module | Engine) -> IoEngine:
    """What does its transfers; it must have a disk."""
    io = (paged if isinstance(paged, Engine) else engine_of(paged))._disk.io
    assert io is not None
    return io


def disk_rates_of(paged: nn.Module | Engine) -> Bandwidths:
    """Those that the placement was made with, of one rank."""
    return (paged if isinstance(paged, Engine) else engine_of(paged))._disk.bandwidths


def handle_of(param: Tensor) -> ParamHandle:
    """A paged parameter's place."""
    handle = param.__dict__["_slot"]
    assert isinstance(handle, ParamHandle)
    return handle


def reads_of(param: Tensor) -> list[float]:
    """When reads of the weights of a parameter's unit from the disk began, in seconds of ``time.perf_counter``. Its
    engine has a timeline."""
    handle, timeline = handle_of(param), engine_of_param(param).timeline
    assert handle.unit is not None and timeline is not None
    name = handle.unit.weights.name
    return [span.begin_s for span in timeline.spans() if span.lane is Lane.READ and span.name == name]


def is_paged(model: nn.Module) -> bool:
    """Whether any of its parameters is."""
    return any("_slot" in param.__dict__ for param in model.parameters())


def engine_of_param(param: Tensor) -> Engine:
    """The engine that pages a parameter."""
    engine = handle_of(param).pager.engine
    assert isinstance(engine, Engine)
    return engine


def save_of(state: TrainingState) -> SaveHandle | None:
    """The save that runs in the background."""
    return state._running


def leases_of(paged: nn.Module | Engine) -> int:
    """How many leases all blocks have together."""
    return sum(block.leases for block in tiers_of(paged).blocks())


def owned_gradient(gradients: RankGradients, handle: ParamHandle) -> tuple[int, Tensor] | None:
    """What this rank owns of a landed gradient: its first element, and a copy of the values. None where it owns
    none."""
    slot = gradients.in_block(handle)
    assert slot is not None and slot.cut is not None and slot.block is not None
    run, tiers = slot.cut.run(), gradients.tiers
    if run is None:
        return None
    tiers.acquire(slot.block)
    start = slot.element_address(run.start) - tiers.arena.address
    found = torch.frombuffer(tiers.arena.buffer, dtype=slot.dtype, count=run.numel, offset=start).clone()
    tiers.release(slot.block)
    return run.start, found


def watch_landings(engine: Engine) -> list[int]:
    """Watch gathers for which memory has no room next to a landing: each is launched when all reductions have landed.
    Returns how many had not when it came, by gather, as they come."""
    assert isinstance(engine.gradients, RankGradients)
    contributions, waited = engine.gradients.contributions, list[int]()
    link, slots = contributions._link, contributions._slots
    before_gather = link.before_gather

    def watched(paged_bytes: int) -> None:
        has_spare, in_flight = slots.has_spare(paged_bytes), len(contributions._reducing)
        before_gather(paged_bytes)
        if not has_spare:
            assert not contributions._reducing
            waited.append(in_flight)

    link.before_gather = watched
    return waited
