"""Shards, parts and sums together: several ranks have the gradients and the norm of one that accumulates, bit for bit.

What ranks would send each other is taken from their contributions directly.
"""

from __future__ import annotations

import numpy as np
import pytest

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, norm_of
from deepoffload.params.shards import FlatTensor, ShardLayout, shard_layout
from deepoffload.ranks.exchange import chunk_ranges
from deepoffload.ranks.sums import SquareSum, added, mean_scale, packed, unpacked

NUMELS = [3, 70_000, 1, 4097, 600, 300_001, 1500]
MICRO_BATCHES = 2


def gradient(numel: int, *seed: int) -> np.ndarray:
    """Numbers that stay normal ones when they are divided by the number of ranks."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], numel)
    return (rng.uniform(1, 2, numel) * signs * 2.0 ** rng.integers(-9, 4, numel)).astype(np.float32)


def land(dst: np.ndarray, parts: list[np.ndarray], scale: float, accumulate: bool) -> SquareSum:
    addresses = [part.ctypes.data for part in parts]
    settings = {"dtype": DType.FP32, "scale": scale, "accumulate": accumulate, "num_threads": 2}
    return SquareSum(*cpu_adam.land_parts(dst.ctypes.data, addresses, dst.size, **settings))  # type: ignore[arg-type]


def one_rank(world_size: int) -> tuple[list[np.ndarray], SquareSum]:
    """Accumulates the micro-batches of all, in the order (micro-batch, rank). Where 1 / ``world_size`` is exact, its
    losses are divided by it, so the gradients come divided; else it scales where it lands them."""
    sums = [np.full(numel, np.nan, np.float32) for numel in NUMELS]
    exact = mean_scale(world_size).as_integer_ratio()[1] == world_size
    squares: dict[int, SquareSum] = {}
    for order in range(MICRO_BATCHES * world_size):
        micro_batch, rank = divmod(order, world_size)
        for index, total in enumerate(sums):
            new = gradient(total.size, rank, micro_batch, index)
            if exact:
                new /= np.float32(world_size)
            squares[index] = land(total, [new], 1.0 if exact else mean_scale(world_size), order > 0)
    return sums, added(squares.values())


def contribution(layout: ShardLayout, rank: int, micro_batch: int) -> np.ndarray:
    whole = np.zeros(layout.whole_nbytes // 4, np.float32)
    for index, (numel, offset) in enumerate(zip(NUMELS, layout.offsets, strict=True)):
        whole[offset // 4 : offset // 4 + numel] = gradient(numel, rank, micro_batch, index)
    return whole


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_ranks_have_the_bits_of_one(world_size: int) -> None:
    layout = shard_layout([FlatTensor(numel, 4) for numel in NUMELS], world_size)
    shard_numel = layout.shard_nbytes // 4
    shards = [np.full(shard_numel, np.nan, np.float32) for _ in range(world_size)]
    for micro_batch in range(MICRO_BATCHES):
        contributions = [contribution(layout, rank, micro_batch) for rank in range(world_size)]
        sent = []
        for owner, shard in enumerate(shards):
            parts = [whole[owner * shard_numel : (owner + 1) * shard_numel] for whole in contributions]
            squares = []
            for start, numel in chunk_ranges(shard_numel):
                for run in layout.runs_between(owner, start * 4, (start + numel) * 4):
                    here = slice(run.shard_offset // 4, run.shard_offset // 4 + run.numel)
                    scale = mean_scale(world_size)
                    squares.append(land(shard[here], [part[here] for part in parts], scale, micro_batch > 0))
            sent.append(packed(added(squares)))
    expected, expected_squares = one_rank(world_size)
    whole = np.concatenate(shards)
    for total, offset in zip(expected, layout.offsets, strict=True):
        assert np.array_equal(whole[offset // 4 : offset // 4 + total.size].view(np.int32), total.view(np.int32))
    together = unpacked(b"".join(sent), world_size)
    assert together == expected_squares
    assert norm_of(together.total) == pytest.approx(float(np.linalg.norm(np.concatenate(expected).astype(float))))
