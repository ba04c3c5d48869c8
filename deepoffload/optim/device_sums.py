"""Sums of squares of gradients that stay on a device, with the bits of the host's (``csrc/cpu_adam/exact_sum.h``).

A block of 4096 elements is summed in float64 in 32 lanes, which are added in one order; the sums of blocks are added
exactly, as integers, on the host. So a norm does not depend on where a gradient lies, and a step clips by the same
factor whether its gradients are on the host or on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from deepoffload.native.cpu_adam import SUM_BLOCK, SUM_UNIT

LANES = 32
STEPS = SUM_BLOCK // LANES
BLOCK_SCRATCH_BYTES = (SUM_BLOCK + LANES) * 8
"""What the sum of one block needs meanwhile."""

_FRACTION_BITS = 52
_UNIT_EXPONENT = SUM_UNIT.bit_length() - 1


def blocks_of(numel: int) -> int:
    """In how many blocks so many elements are summed."""
    return -(-numel // SUM_BLOCK)


def block_sums(parts: Sequence[Tensor], sums: Tensor, scratch: Tensor) -> None:
    """The sum of squares of each block of :data:`SUM_BLOCK` elements, by torch's operators.

    Args:
        parts: flat, fp32, bf16 or fp16, on a device. The last block of each may be shorter.
        sums: float64 there, one for each block of each part, one after the other; overwritten.
        scratch: uint8, at least :data:`BLOCK_SCRATCH_BYTES`, there, aligned to 8 bytes; overwritten. More of it means
            fewer kernels: blocks of several parts are summed at once.
    """
    at = 0
    for batch in _batches(parts, scratch.numel() // BLOCK_SCRATCH_BYTES):
        count = sum(blocks_of(part.numel()) for part in batch)
        floats = scratch[: count * BLOCK_SCRATCH_BYTES].view(torch.float64)
        squares, lanes = floats[: count * SUM_BLOCK], floats[count * SUM_BLOCK :].view(count, LANES)
        begin = 0
        for part in batch:
            end = begin + blocks_of(part.numel()) * SUM_BLOCK
            squares[begin : begin + part.numel()].copy_(part)
            squares[begin + part.numel() : end].zero_()
            begin = end
        squares.mul_(squares)  # exact: 24 bits have become 48
        lanes.zero_()
        for row in squares.view(count, STEPS, LANES).unbind(1):
            lanes.add_(row)
        half = LANES // 2
        while half:
            lanes[:, :half].add_(lanes[:, half : 2 * half])
            half //= 2
        sums[at : at + count].copy_(lanes[:, 0])
        at += count


def _batches(parts: Sequence[Tensor], blocks_max: int) -> Iterator[list[Tensor]]:
    """``parts`` cut and put together so that no batch has more blocks."""
    batch: list[Tensor] = []
    left = blocks_max
    for part in parts:
        begin = 0
        while begin < part.numel():
            piece = part[begin : begin + left * SUM_BLOCK]
            batch.append(piece)
            begin += piece.numel()
            left -= blocks_of(piece.numel())
            if not left:
                yield batch
                batch, left = [], blocks_max
    if batch:
        yield batch


def exact_total(sums: Tensor) -> tuple[int, bool]:
    """What :func:`~deepoffload.native.cpu_adam.land` returns: the sum of the blocks in units of 1 / SUM_UNIT, and
    whether one of them is not finite, which then does not count.

    Args:
        sums: of :func:`block_sums`, on the CPU.
    """
    values = sums.numpy()
    finite = np.isfinite(values)
    bits = values[finite & (values != 0)].view(np.uint64)
    exponents = (bits >> np.uint64(_FRACTION_BITS)).astype(np.int64)
    mantissas = (bits & np.uint64((1 << _FRACTION_BITS) - 1)) | np.uint64(1 << _FRACTION_BITS)
    total = 0
    for shift, part in ((0, mantissas & np.uint64(0xFFFFFFFF)), (32, mantissas >> np.uint64(32))):
        # Sums of fewer than 2**21 integers below 2**32: exact in float64.
        by_exponent = np.bincount(exponents, weights=part.astype(np.float64)) if len(part) else np.zeros(0)
        for exponent in np.flatnonzero(by_exponent):
            # of the last bit: the exponent without its bias, less the bits of the fraction
            position = int(exponent) - 1023 - _FRACTION_BITS + _UNIT_EXPONENT + shift
            total += int(by_exponent[exponent]) << position
    return total, not bool(finite.all())
