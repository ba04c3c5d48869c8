"""The transport by collectives of torch.distributed: gloo between CPUs, NCCL between CUDA devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from deepoffload.errors import RankError
from deepoffload.ranks import collectives
from deepoffload.ranks.collectives import as_bytes
from deepoffload.ranks.exchange import Exchange, Flight, PartsFlight, Reduction, chunk_ranges, group_scratch_bytes
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.words import layer_in_words

SPARE_S = 60.0
"""torch's limit for a collective is longer than ours by this: our waits end first, and say who waits for what."""


POLL_S = 0.0005
"""How often a wait looks whether a device has come so far."""


class _CollectiveFlight(Flight):
    """The collectives of one transfer. Their tensors live as long as they are under way."""

    def __init__(
        self, exchange: GroupExchange, works: Sequence[dist.Work], tensors: Sequence[Tensor | None], waiting: str
    ) -> None:
        self._exchange = exchange
        self._works = list(works)
        self._tensors = tensors
        self._waiting = waiting

    def ready(self) -> bool:
        return all(self._exchange.is_over(work) for work in self._works)

    def ready_within(self, limit_s: float) -> bool:
        return self._exchange.ended_within(self._works, limit_s, self._waiting)

    def releasable_within(self, limit_s: float) -> bool:
        return self.ready_within(limit_s)

    def wait(self) -> None:
        while self._works:
            self._exchange.finish(self._works[0], self._waiting)
            self._works.pop(0)
        self._tensors = ()

    def release(self) -> None:
        self.wait()


class _CollectiveParts(_CollectiveFlight, PartsFlight):
    def __init__(
        self, exchange: GroupExchange, work: dist.Work, sent: Tensor, received: Tensor, parts: Tensor, waiting: str
    ) -> None:
        super().__init__(exchange, [work], [sent, received], waiting)
        self._parts = parts

    def chunks(self) -> Iterator[tuple[int, list[Tensor]]]:
        self.wait()
        for start, length in chunk_ranges(self._parts.shape[1]):
            yield start, list(self._parts[:, start : start + length].unbind())


class GroupExchange(Exchange):
    """Transfers are collectives in a private group, so their order is that in which they are started."""

    transport = "group"

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.ranks)
        self._timeout_s = group.timeout_s
        self._payload = group.new_private_group("payload", on_device=True, timeout_s=self._timeout_s + SPARE_S)
        self._on_device = group.device.type != "cpu"
        self._works: list[dist.Work] = []

    def gather(self, shard: Tensor, whole: Tensor | None, what: str, takers: Sequence[int] | None = None) -> Flight:
        self._check_gather(shard, whole, what, takers)
        ours, rank = as_bytes(shard), self.ranks.rank
        if whole is not None and (takers is None or len(takers) == self.ranks.world_size):
            works = [collectives.start_all_gather(as_bytes(whole), ours, self._payload)]
        else:
            parts = None if whole is None else list(as_bytes(whole).chunk(self.ranks.world_size))
            works = [
                collectives.start_gather(parts if taker == rank else None, ours, taker, self._payload)
                for taker in takers or ()
            ]
        if whole is not None:
            self.gather_bytes += ours.numel() * (self.ranks.world_size - 1)
        self._remember(works)
        return _CollectiveFlight(self, works, (shard, whole), f"rank {rank} at gather of {layer_in_words(what)}")

    def send_parts(self, contribution: Tensor | None, reduction: Reduction, scratch: Tensor, what: str) -> PartsFlight:
        self._check_parts(contribution, reduction, scratch, what)
        part_bytes, world_size, contributors = reduction.part_bytes, self.ranks.world_size, reduction.contributors
        received = scratch[: self.scratch_bytes(reduction)]
        sent = scratch[:0] if contribution is None else as_bytes(contribution)
        work = collectives.start_all_to_all(
            received,
            sent,
            [part_bytes if rank in contributors else 0 for rank in range(world_size)],
            [0 if contribution is None else part_bytes] * world_size,
            self._payload,
        )
        self.part_bytes += part_bytes * sum(rank != self.ranks.rank for rank in contributors)
        self._remember([work])
        parts = received.view(reduction.element_type).view(len(contributors), reduction.shard_numel)
        return _CollectiveParts(
            self, work, sent, received, parts, f"rank {self.ranks.rank} at reduction of {layer_in_words(what)}"
        )

    def scratch_bytes(self, reduction: Reduction) -> int:
        return group_scratch_bytes(reduction)

    def finish(self, work: dist.Work, waiting: str) -> None:
        """Wait for a collective. On a device the stream waits and not the host, and NCCL's watchdog has the limit.

        Raises:
            RankError: it failed, or has not ended within the limit.
        """
        if self._on_device:
            work.wait()
        else:
            collectives.finish(work, self._payload, self._timeout_s, waiting)

    def is_over(self, work: dist.Work) -> bool:
        """Whether a collective has ended. The future of one of NCCL's is there as soon as it has begun."""
        return work.is_completed() if self._on_device else collectives.is_over(work)

    def ended_within(self, works: Sequence[dist.Work], limit_s: float, waiting: str) -> bool:
        """Whether collectives end within ``limit_s``.

        Raises:
            RankError: one has failed.
        """
        until = time.monotonic() + limit_s
        if self._on_device:
            # The wait of NCCL's that has a limit ends the group when it is over.
            while not all(self.is_over(work) for work in works) and time.monotonic() < until:
                time.sleep(POLL_S)
            return all(self.is_over(work) for work in works)
        try:
            return all(collectives.wait_within(work, until - time.monotonic()) for work in works)
        except collectives.LinkError as error:
            raise RankError(f"{waiting}: another rank has gone or failed ({error})") from error

    def close(self) -> None:
        """Nothing is left to do: a collective that has ended here has sent all that it had to. Its group ends with the
        RankGroup."""

    def abandon(self) -> None:
        if self._on_device:
            self._payload.abort()
        else:
            collectives.break_off(self._payload, self._works)
            self._works.clear()

    def idle(self) -> bool:
        self._remember(())
        return not self._works

    def _remember(self, started: Sequence[dist.Work]) -> None:
        """Those that are under way."""
        self._works = [*(work for work in self._works if not self.is_over(work)), *started]
