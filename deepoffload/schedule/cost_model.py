"""What a block costs on NVMe: bytes moved per step, seconds, and seconds saved per byte of memory.

The one cost model of the project: placement decides with it and the estimators predict with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum


class BlockKind(Enum):
    """What a block holds."""

    WEIGHT = "weights"
    GRADIENT = "gradients"
    STATE = "optimizer state"
    ACTIVATION = "activations"
    """In a separate part of the memory, which no plan knows."""


class StepOverlap(Enum):
    """When the optimizer's update runs. All give the same bits."""

    DEFERRED = "deferred"
    """A unit is updated after the step was asked for, right before its next forward, in one visit with it."""
    IN_BACKWARD = "in_backward"
    """A unit is updated when its last gradient has landed, in one visit with its backward; needs clipping to be off."""
    SPECULATIVE = "speculative"
    """As ``DEFERRED``, but some units are updated when their last gradient has landed, before the norm of all is known;
    ``step()`` confirms that, or undoes it and defers these, too."""
    NONE = "none"
    """All units are updated inside ``step()``, one after the other: the serial reference."""


class AccumulationOrder(Enum):
    """In which order the micro-batches of a step are run. All give the same bits."""

    AUTO = "auto"
    """Vertical where that saves time, else horizontal (:mod:`deepoffload.schedule.accumulation_order`)."""
    VERTICAL = "vertical"
    """All micro-batches go through a unit before any goes on to the next."""
    HORIZONTAL = "horizontal"
    """One after the other."""


@dataclass(frozen=True)
class Workload:
    """What one optimizer step does: ``accumulation_steps`` times forward and backward, then one update.

    ``training=False``: one forward pass and nothing else. ``order``: of the micro-batches, as decided.
    """

    accumulation_steps: int = 1
    step_overlap: StepOverlap = StepOverlap.NONE
    training: bool = True
    order: AccumulationOrder = AccumulationOrder.HORIZONTAL

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be at least 1, not {self.accumulation_steps}")
        if self.order is AccumulationOrder.AUTO:
            raise ValueError("order must be decided: vertical or horizontal")

    @property
    def passes(self) -> int:
        """How often a step goes through the units, forward and backward."""
        return self.accumulation_steps // self.together

    @property
    def together(self) -> int:
        """How many micro-batches each pass takes through a unit."""
        return self.accumulation_steps if self.order is AccumulationOrder.VERTICAL else 1


@dataclass(frozen=True)
class Traffic:
    """Bytes between memory and NVMe."""

    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """In both directions."""
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)


@dataclass(frozen=True)
class Bandwidths:
    """Measured rates, in bytes per second.

    ``mixed_bytes_per_s``: read and written together while both directions are busy. A disk which shares its bandwidth
    gives about what one direction gives; full duplex gives the sum. ``memory_bytes_per_s``: the Adam-shaped stream of
    the update (reads and in-place writes together).
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_rates(self)

    def serial_seconds(self, traffic: Traffic) -> float:
        """Time when reads and writes never overlap."""
        return traffic.read_bytes / self.read_bytes_per_s + traffic.written_bytes / self.write_bytes_per_s

    def seconds(self, traffic: Traffic) -> float:
        """Least time: both directions take turns request by request until the smaller is done, or one after the other
        where the disk is faster that way."""
        both = min(traffic.read_bytes, traffic.written_bytes)
        rest_s = self.serial_seconds(Traffic(traffic.read_bytes - both, traffic.written_bytes - both))
        return min(2 * both / self.mixed_bytes_per_s + rest_s, self.serial_seconds(traffic))

    def prices(self, traffic: Traffic) -> tuple[float, float]:
        """Seconds that one byte less to read and one byte less to write would save at this traffic.

        The gradient of ``seconds``: on a duplex disk the direction that finishes first costs little or nothing. Where
        both are equal any split is right; both then cost half of a pair.
        """
        read_s, write_s, pair_s = 1 / self.read_bytes_per_s, 1 / self.write_bytes_per_s, 2 / self.mixed_bytes_per_s
        if pair_s >= read_s + write_s:
            return read_s, write_s
        if traffic.read_bytes > traffic.written_bytes:
            return read_s, max(pair_s - read_s, 0.0)
        if traffic.read_bytes < traffic.written_bytes:
            return max(pair_s - write_s, 0.0), write_s
        return pair_s / 2, pair_s / 2


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank gets from the others in a step: of shards, for whole copies, and of contributions."""

    gathered_bytes: int = 0
    reduced_bytes: int = 0


@dataclass(frozen=True)
class LinkRates:
    """What one rank gets from the others, measured, in bytes per second.

    ``gather_bytes_per_s``: of shards, as whole copies are put together. ``reduce_bytes_per_s``: of contributions, until
    their owner has added them up.
    """

    gather_bytes_per_s: float
    reduce_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_rates(self)

    def seconds(self, traffic: RankTraffic) -> float:
        """One transfer after the other."""
        return traffic.gathered_bytes / self.gather_bytes_per_s + traffic.reduced_bytes / self.reduce_bytes_per_s


def _check_rates(rates: Bandwidths | LinkRates) -> None:
    for field in fields(rates):
        value = getattr(rates, field.name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{field.name} must be a positive finite number of bytes per second, not {value}")


def block_traffic(kind: BlockKind, nbytes: int, workload: Workload, *, updated: bool = True) -> Traffic:
    """Bytes moved per optimizer step for one block that is not resident.

    ``updated``: whether the step changes the block's unit (False for frozen weights). With k passes, one for each
    micro-batch in horizontal order and one for all of them in vertical order:

    - weights: one read for each of k forwards and k backwards, and a read and a write for the update. An update that
      shares the visit of a forward (``DEFERRED``) or a backward (``IN_BACKWARD``) needs no separate read.
    - gradients: each landing writes; each landing but the first reads what it adds to, and so does the update.
      ``IN_BACKWARD`` consumes the last landing on the spot.
    - state: read once and written once.
    """
    k = workload.passes
    if not workload.training:
        return Traffic(nbytes if kind is BlockKind.WEIGHT else 0, 0)
    if kind is BlockKind.WEIGHT:
        own_visit = updated and workload.step_overlap is StepOverlap.NONE
        return Traffic((2 * k + own_visit) * nbytes, updated * nbytes)
    if not updated:
        return Traffic()
    if kind is BlockKind.GRADIENT:
        visits = k - 1 if workload.step_overlap is StepOverlap.IN_BACKWARD else k
        return Traffic(visits * nbytes, visits * nbytes)
    return Traffic(nbytes, nbytes)


def seconds_saved(traffic: Traffic, prices: tuple[float, float]) -> float:
    """Seconds per step that this traffic costs at ``Bandwidths.prices``. For the traffic of one byte (``block_traffic``
    with ``nbytes=1``): the seconds saved per byte of memory that keeps such a block resident."""
    return traffic.read_bytes * prices[0] + traffic.written_bytes * prices[1]


UPDATE_BYTES_PER_BYTE = 2
"""An update reads and writes what it changes."""


def update_seconds(touched_bytes: int, bandwidths: Bandwidths) -> float:
    """Time of the host update, which is bound by memory. ``touched_bytes`` counts reads and writes."""
    return touched_bytes / bandwidths.memory_bytes_per_s
