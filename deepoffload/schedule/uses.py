"""The order in which an optimizer step uses blocks: one program, which the estimators and the simulations play.

The engine's order is what the program does, event by event (``params.pager``). This is that order in advance, from the
visits of one forward and backward; ``tests/runtime/test_order_of_uses.py`` compares the two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deepoffload.schedule.cost_model import BlockKind, StepOverlap, Workload
from deepoffload.schedule.events import Event, Phase
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.speculation import FIRST_SHARE, choose_evenly


@dataclass(frozen=True)
class Use:
    """An event and what it does to its blocks: ``writes`` are changed by it, ``drops`` are worthless after it (a
    gradient once it is applied: never written back, and next time it begins empty without a read), ``named`` belong to
    the event and are not touched (a gradient that does not land yet)."""

    event: Event
    writes: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    named: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepUse:
    """A use and its place in the step: which units, which of their pieces, and the numbers of the visits (none for an
    update) that it stands for. In vertical order all micro-batches make these visits in it. ``in_backward``: an update
    that is made there, before the step is known (``guess``), or for good."""

    use: Use
    phase: Phase
    units: tuple[int, ...]
    piece: int = 0
    visits: tuple[int, ...] = ()
    in_backward: bool = False
    guess: bool = False


@dataclass(frozen=True)
class UnitBlocks:
    """Ids of the blocks of a unit. ``gradients``: None where it is frozen. ``moving``: those of ``state`` that are
    updated on a guess where the unit is, of ``moving_bytes`` in all: what does not stay in memory. Where a device
    computes, all state, and ``kept_bytes`` of memory keep what staying blocks were."""

    weights: int
    gradients: int | None
    state: tuple[int, ...]
    moving: tuple[int, ...] = ()
    moving_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class Guessing:
    """How many guesses there are: of this share of the state, as far as what they keep has room in memory."""

    share: float = FIRST_SHARE
    room_bytes: float = math.inf


class UnitVisit(Protocol):
    """A stretch of one forward and backward in which the program uses ``units`` (in backward one; none where it
    computes without weights). ``landed``: parameters of each unit whose gradients are complete in it."""

    @property
    def backward(self) -> bool: ...

    @property
    def units(self) -> tuple[int, ...]: ...

    @property
    def landed(self) -> Mapping[int, int]: ...


def unit_blocks(
    blocks: Iterable[BlockSpec], resident: Container[int] = (), *, on_device: bool = False
) -> dict[int, UnitBlocks]:
    """The blocks of each unit by its number, in the order of the numbers.

    Args:
        resident: ids of those that stay in memory.
        on_device: a device computes.
    """
    moving: dict[int, list[BlockSpec]] = {}
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    state: dict[int, list[int]] = {}
    kept: Counter[int] = Counter()
    for block in blocks:
        if on_device and block.kind is not BlockKind.GRADIENT and block.id in resident:
            kept[block.unit] += block.nbytes
        if block.kind is BlockKind.WEIGHT:
            weights[block.unit] = block.id
        elif block.kind is BlockKind.GRADIENT:
            gradients[block.unit] = block.id
        else:
            state.setdefault(block.unit, []).append(block.id)
            if on_device or block.id not in resident:
                moving.setdefault(block.unit, []).append(block)
    return {
        unit: UnitBlocks(
            weights[unit],
            gradients.get(unit),
            tuple(state.get(unit, ())),
            tuple(block.id for block in moving.get(unit, ())),
            sum(block.nbytes for block in moving.get(unit, ())),
            kept[unit],
        )
        for unit in sorted(weights)
    }


def step_uses(
    visits: Sequence[UnitVisit],
    units: Mapping[int, UnitBlocks],
    workload: Workload,
    *,
    first: bool = False,
    guessing: Guessing = Guessing(),
) -> list[StepUse]:
    """The uses of one step in the order in which the engine sees them.

    Args:
        visits: of one micro-batch.
        first: no step came before this one, so with ``DEFERRED`` there is no update to make, and ``SPECULATIVE``
            guesses nothing. In vertical order the first micro-batch runs alone, to show the order.
        guessing: how many guesses there are with ``SPECULATIVE``.
    """
    guessed = {} if first else guessed_pieces(visits, units, workload, guessing)
    uses = list(_uses(visits, units, workload, first, guessed))
    done = [units[unit].gradients for unit, pieces in guessed.items() if len(pieces) == len(units[unit].state)]
    if done:  # the step confirms them, and needs their gradients no more
        last = uses[-1]
        drops = (*last.use.drops, *(block for block in done if block is not None))
        uses[-1] = replace(last, use=replace(last.use, drops=drops))
    return _folded(uses)


def seen_until_zero_grad(units: Mapping[int, UnitBlocks], workload: Workload) -> list[int]:
    """The blocks of gradients that are still there when the step is over, until the program lets go of them. Elsewhere
    an update consumes what it has applied."""
    if workload.step_overlap is not StepOverlap.NONE or not workload.training:
        return []
    return [unit.gradients for unit in units.values() if unit.gradients is not None]


def _uses(
    visits: Sequence[UnitVisit],
    units: Mapping[int, UnitBlocks],
    workload: Workload,
    first: bool,
    guessed: Mapping[int, tuple[int, ...]],
) -> Iterator[StepUse]:
    if not workload.training:
        yield from (_visit(number, visit, units) for number, visit in enumerate(visits) if not visit.backward)
        return
    overlap, passes = workload.step_overlap, workload.passes + (first and workload.together > 1)
    last_pass = passes - 1
    pending = {number: tuple(range(len(unit.state))) for number, unit in units.items() if unit.gradients is not None}
    deferred = overlap in (StepOverlap.DEFERRED, StepOverlap.SPECULATIVE)
    if first and deferred:
        pending.clear()
    last_landing = _last_landings(visits)
    for unit, pieces in guessed.items():
        pending[unit] = tuple(piece for piece in pending.get(unit, ()) if piece not in pieces)

    def updates(which: Iterable[int]) -> Iterator[StepUse]:
        for unit in which:
            yield from _update(unit, units[unit], pending.pop(unit, ()), drops=overlap is not StepOverlap.NONE)

    for number_of_pass in range(passes):
        for number, visit in enumerate(visits):
            if deferred and not visit.backward:
                yield from updates(visit.units)
            yield _visit(number, visit, units)
            if overlap is StepOverlap.IN_BACKWARD and number_of_pass == last_pass:
                done = updates(unit for unit in visit.landed if last_landing[unit] == number)
                yield from (replace(update, in_backward=True) for update in done)
            if number_of_pass == last_pass:
                for unit in visit.landed:
                    if last_landing[unit] == number:
                        guess = _update(unit, units[unit], guessed.get(unit, ()), drops=False)
                        yield from (replace(update, in_backward=True, guess=True) for update in guess)
    yield from updates(sorted(pending))


def _visit(number: int, visit: UnitVisit, units: Mapping[int, UnitBlocks]) -> StepUse:
    phase = Phase.BACKWARD if visit.backward else Phase.FORWARD
    weights = [units[unit].weights for unit in visit.units]
    gradients = {unit: block for unit in visit.units if (block := units[unit].gradients) is not None}
    if not visit.backward:
        gradients = {}
    use = Use(
        Event((phase, visit.units), (*weights, *gradients.values())),
        writes=tuple(block for unit, block in gradients.items() if unit in visit.landed),
        named=tuple(block for unit, block in gradients.items() if unit not in visit.landed),
    )
    return StepUse(use, phase, visit.units, visits=(number,))


def _last_landings(visits: Sequence[UnitVisit]) -> dict[int, int]:
    """The visit in which a unit has all its gradients."""
    return {unit: number for number, visit in enumerate(visits) for unit in visit.landed}


def guessed_pieces(
    visits: Sequence[UnitVisit], units: Mapping[int, UnitBlocks], workload: Workload, guessing: Guessing = Guessing()
) -> dict[int, tuple[int, ...]]:
    """The pieces that are updated inside backward on a guess, in a step whose guesses are right."""
    if workload.step_overlap is not StepOverlap.SPECULATIVE or not workload.training:
        return {}
    last_landing = _last_landings(visits)
    order = sorted(last_landing, key=lambda unit: last_landing[unit])
    chosen = choose_evenly([units[unit].moving_bytes for unit in order], guessing.share)
    found, room_bytes = {}, guessing.room_bytes
    for unit, taken in zip(order, chosen, strict=True):
        blocks = units[unit]
        if taken and blocks.kept_bytes <= room_bytes:
            found[unit] = tuple(number for number, block in enumerate(blocks.state) if block in blocks.moving)
            room_bytes -= blocks.kept_bytes
    return found


def _update(number: int, unit: UnitBlocks, pieces: Sequence[int], *, drops: bool) -> Iterator[StepUse]:
    for piece in pieces:
        state = unit.state[piece]
        used = (unit.weights, state) if unit.gradients is None else (unit.weights, unit.gradients, state)
        last = piece == pieces[-1]
        use = Use(
            Event((Phase.UPDATE, (number, piece)), used),
            writes=(unit.weights, state),
            drops=(unit.gradients,) if last and drops and unit.gradients is not None else (),
        )
        yield StepUse(use, Phase.UPDATE, (number,), piece)


def _folded(uses: Iterable[StepUse]) -> list[StepUse]:
    """One use where the same event comes twice in a row, and none for visits without units: these belong to the visit
    before them (to the one after them at the beginning of the step), also with an update between."""
    folded: list[StepUse] = []
    visited: int | None = None
    waiting: tuple[int, ...] = ()
    for use in uses:
        if not use.units and visited is None:
            waiting += use.visits
        elif not use.units and visited is not None:
            folded[visited] = _joined(folded[visited], use)
        elif folded and use.use.event == folded[-1].use.event:
            folded[-1] = _joined(folded[-1], use)
        elif use.phase is Phase.UPDATE:
            folded.append(use)
        else:
            visited = len(folded)
            folded.append(StepUse(use.use, use.phase, use.units, use.piece, waiting + use.visits))
            waiting = ()
    return folded


def _joined(one: StepUse, other: StepUse) -> StepUse:
    writes = tuple(dict.fromkeys(one.use.writes + other.use.writes))
    named = tuple(block for block in one.use.named if block not in writes)
    use = Use(one.use.event, writes, one.use.drops + other.use.drops, named)
    return replace(one, use=use, visits=one.visits + other.visits)
