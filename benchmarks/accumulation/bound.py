"""The least time that a step with deferred, clipped updates can take on a disk, in each order of micro-batches.

No update can begin before the last gradient has landed, because the norm of all of them is not known. And each unit's
update has to be through before its next forward. So a step has two phases, and in each of them computing and the disk
run at the same time at best:

- *update*: the forward of the first micro-batch in horizontal order, those of all of them in vertical order. All
  updates, and what they read and write.
- *rest*: all other forwards and backwards, and the weights and gradients that they move. What else the disk can do here
  is to write what memory still holds of the last update and to fill it for the next one.

Not counted: the processor's work for the transfers themselves, and that the first and the last transfer of a phase have
nothing to run next to. So a real step takes longer.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from deepoffload.schedule.cost_model import Bandwidths, BlockKind, Traffic
from deepoffload.schedule.placement import Placement

SPLITS = 200


class Computing(NamedTuple):
    """Seconds of a step with everything in memory: all forwards, all backwards, and the update."""

    forward_s: float
    backward_s: float
    update_s: float

    @classmethod
    def of(cls, steps: list[dict[str, float]]) -> Computing:
        """Of steps in horizontal order, as a row has measured them."""
        return cls(
            statistics.median(step["forward_s"] for step in steps),
            statistics.median(step["seconds"] - step["forward_s"] - step["update_s"] for step in steps),
            statistics.median(step["update_s"] for step in steps),
        )


class Moves(NamedTuple):
    """What the disk moves in each phase. ``passing_bytes``: memory for what does not stay in it."""

    update: Traffic
    rest: Traffic
    passing_bytes: int


def moves_of(placement: Placement, passes: int) -> Moves:
    """Of a step that goes through the units so many times, forward and backward."""
    trained = {block.unit for block in placement.blocks if block.kind is not BlockKind.WEIGHT}
    update, rest = Traffic(), Traffic()
    for block in placement.blocks:
        if block.id not in placement.paged:
            continue
        nbytes = round(block.nbytes * block.read_share)
        if block.kind is BlockKind.STATE:
            update += Traffic(nbytes, nbytes)
        elif block.kind is BlockKind.WEIGHT:
            update += Traffic(nbytes, nbytes if block.unit in trained else 0)
            rest += Traffic((2 * passes - 1) * nbytes, 0)
        else:
            update += Traffic(nbytes, 0)
            rest += Traffic((passes - 1) * nbytes, passes * nbytes)
    return Moves(update, rest, max(0, placement.capacity_bytes - placement.resident_bytes))


def bound_seconds(moves: Moves, rates: Bandwidths, computing: Computing, passes: int) -> float:
    """Of a step that is repeated."""
    first_s = computing.forward_s / passes
    update_s, rest_s = first_s + computing.update_s, computing.forward_s - first_s + computing.backward_s
    most_bytes = min(moves.passing_bytes, moves.update.read_bytes, moves.update.written_bytes)

    def step_s(nbytes: int) -> float:
        """Where so much of the update is read, and as much written, in the other phase."""
        in_update = Traffic(moves.update.read_bytes - nbytes, moves.update.written_bytes - nbytes)
        in_rest = moves.rest + Traffic(nbytes, nbytes)
        return max(update_s, rates.seconds(in_update)) + max(rest_s, rates.seconds(in_rest))

    return min(step_s(most_bytes * part // SPLITS) for part in range(SPLITS + 1))


def bounds_of(found: dict[str, Any], computing: Computing) -> dict[str, float]:
    """By order, of a row that says what it moves."""
    rates = Bandwidths(*found["rates"])
    bounds = {}
    for order, (passes, update, rest, passing_bytes) in found["moves"].items():
        moves = Moves(Traffic(*update), Traffic(*rest), passing_bytes)
        bounds[order] = bound_seconds(moves, rates, computing, passes)
    return bounds
