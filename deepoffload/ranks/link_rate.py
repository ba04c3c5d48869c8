"""How fast bytes come from the other ranks, measured with the transport that carries them in training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.aio import HostMapping
from deepoffload.native.cpu_adam import DType
from deepoffload.ranks.exchange import CHUNK_NUMEL, Exchange, Reduction
from deepoffload.ranks.sums import mean_scale
from deepoffload.schedule.cost_model import LinkRates

SHARD_BYTES, WHOLE_BYTES_MAX = 8 << 20, 64 << 20
"""Of what is gathered: as much as a rank has of a layer, and no more than this in all."""
COLD_BYTES = 96 << 20
"""In a step the bytes of a unit come from memory, not from the processor's caches: between two repeats so many others
go through these, at least."""
FEW_BYTES = 4096
"""What ranks gather to begin at the same time."""
REPEATS = 7
WHAT = "a measurement of the link"


def measure_link(exchange: Exchange, num_threads: int = 1) -> LinkRates:
    """Gather and reduce a few times, as units are. Collective; takes some hundredths of a second, and at most 150 MB of
    memory meanwhile.

    Args:
        num_threads: of the sums.

    Raises:
        RankError: another rank has gone.
    """
    world_size = exchange.ranks.world_size
    numel = min(SHARD_BYTES, WHOLE_BYTES_MAX // world_size) // (2 * CHUNK_NUMEL) * CHUNK_NUMEL or CHUNK_NUMEL
    reduction = Reduction(tuple(range(world_size)), numel, torch.bfloat16)
    shard_bytes = reduction.part_bytes
    sizes = [shard_bytes, world_size * shard_bytes, 4 * numel, exchange.scratch_bytes(reduction)]
    sizes.append(max(0, COLD_BYTES - sum(sizes)))
    moved = exchange.gather_bytes, exchange.part_bytes
    with HostMapping(sum(sizes)) as memory:
        rates = _measure(exchange, reduction, memory, sizes, num_threads)
    exchange.gather_bytes, exchange.part_bytes = moved  # which count what training moves
    return rates


def _measure(
    exchange: Exchange, reduction: Reduction, memory: HostMapping, sizes: Sequence[int], num_threads: int
) -> LinkRates:
    """``sizes``: of a shard, a whole copy, a sum, scratch memory and what the caches are filled with. They lie in
    ``memory`` one after the other."""
    everything = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    shard, whole, sums, scratch, others = (
        everything[end - nbytes : end] for end, nbytes in zip(accumulate(sizes), sizes, strict=True)
    )

    def gather() -> None:
        flight = exchange.gather(shard, whole, WHAT)
        flight.wait()
        flight.release()

    def meet() -> None:
        others.fill_(1)
        flight = exchange.gather(shard[:FEW_BYTES], whole[: exchange.ranks.world_size * FEW_BYTES], WHAT)
        flight.wait()
        flight.release()

    def reduce() -> None:
        flight = exchange.send_parts(whole.view(torch.bfloat16), reduction, scratch, WHAT)
        for start, parts in flight.chunks():
            _add_up(sums.data_ptr() + 4 * start, parts, num_threads)
        flight.release()

    from_others_bytes = (exchange.ranks.world_size - 1) * reduction.part_bytes
    return LinkRates(*(from_others_bytes / median_seconds(call, REPEATS, meet) for call in (gather, reduce)))


def _add_up(address: int, parts: list[Tensor], num_threads: int) -> None:
    cpu_adam.land_parts(
        address,
        [part.data_ptr() for part in parts],
        parts[0].numel(),
        dtype=DType.BF16,
        scale=mean_scale(len(parts)),
        accumulate=False,
        num_threads=num_threads,
    )


def median_seconds(call: Callable[[], object], repeats: int, meet: Callable[[], object] = lambda: None) -> float:
    """What ``call`` usually takes. The first one does not count: it touches its memory for the first time.

    ``meet``: called before each, so that several ranks do it at the same time."""
    call()
    times = []
    for _ in range(repeats):
        meet()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
