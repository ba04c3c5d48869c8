"""What ranks add up: the scale of a mean, and the norm from every rank's part of it. Arithmetic only.

A norm begins with sums of squares, one for each run of a parameter that a rank owns (``native.cpu_adam.land_parts``).
These are exact integers. So a rank adds its own first, and sends one number of fixed length. Every rank adds those of
all. Integers add up to the same in any order, so the result is the same on all ranks, and that of one rank which owns
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deepoffload.native.cpu_adam import SUM_BYTES

PART_BYTES = SUM_BYTES + 8
"""Of what a rank sends: its sum, and whether one of its gradients is not finite. A multiple of 8."""


class SquareSum(NamedTuple):
    """Sum of squares of gradients.

    Attributes:
        total: in units of 1 / ``SUM_UNIT``, as ``native.cpu_adam.land`` gives it.
        non_finite: a gradient holds an infinity or NaN. All ranks then skip the step, or all make it.
    """

    total: int
    non_finite: bool


def mean_scale(world_size: int) -> float:
    """What each rank's part of a gradient is multiplied by when it is added to the others: the mean over ranks.

    The landing kernel rounds it to fp32, and each product together with its addition. For a power of two the product is
    exact, so it makes no difference that a single rank divides the loss instead. For three ranks, one that multiplies
    with this scale where it lands its gradients has the same bits.
    """
    return 1.0 / world_size


def packed(part: SquareSum) -> bytes:
    """A rank's part as :data:`PART_BYTES` bytes.

    Raises:
        OverflowError: the total is negative, or longer than any sum of squares is.
    """
    return part.total.to_bytes(SUM_BYTES, "little") + part.non_finite.to_bytes(8, "little")


def added(parts: Iterable[SquareSum]) -> SquareSum:
    """The sum of parts, in any order."""
    total, non_finite = 0, False
    for part in parts:
        total += part.total
        non_finite |= part.non_finite
    return SquareSum(total, non_finite)


def unpacked(gathered: bytes | bytearray | memoryview, world_size: int) -> SquareSum:
    """The sum of all ranks' parts, which lie one after the other in ``gathered``.

    Raises:
        ValueError: ``gathered`` has not the length of ``world_size`` parts, or a flag is neither 0 nor 1.
    """
    if len(gathered) != world_size * PART_BYTES:
        raise ValueError(f"{len(gathered)} bytes are not {world_size} parts of {PART_BYTES} bytes")
    return added(_one(gathered[start : start + PART_BYTES]) for start in range(0, len(gathered), PART_BYTES))


def _one(part: bytes | bytearray | memoryview) -> SquareSum:
    flag = int.from_bytes(part[SUM_BYTES:], "little")
    if flag not in (0, 1):
        raise ValueError(f"a part of a norm ends with {flag}, which is neither 0 nor 1")
    return SquareSum(int.from_bytes(part[:SUM_BYTES], "little"), bool(flag))
