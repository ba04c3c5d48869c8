"""How bytes get from rank to rank: whole copies are gathered from all shards, contributions are sent to the owners.

A unit's elements are cut in as many equal shards as there are ranks; rank r owns the r-th. All ranks start the same
transfers in the same order (rounds see to that), and each is a ``Flight``. There are two transports, which move the
same bytes: ``GroupExchange`` by collectives, ``MemoryExchange`` by reading the neighbours' memory. Nothing is added up
here: the parts of a contribution come to the owner in rank order, range by range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.ranks.places import RankMap

CHUNK_NUMEL = 1 << 17
"""Elements of a part that are handed out at a time: they stay in a core's cache until they have been added up. It is a
multiple of ``native.cpu_adam.SUM_BLOCK``, so the sums of squares over ranges make up those of the whole part."""


@dataclass(frozen=True)
class Reduction:
    """Who contributes what to the shards of a unit.

    Attributes:
        contributors: ranks, in order, at least one. Nothing is sent from others.
        shard_numel: elements of each shard.
        element_type: of every contribution.
    """

    contributors: tuple[int, ...]
    shard_numel: int
    element_type: torch.dtype

    def __post_init__(self) -> None:
        if not self.contributors or list(self.contributors) != sorted(set(self.contributors)):
            raise UsageError(f"contributors={self.contributors}: they are ranks in order, at least one")

    @property
    def part_bytes(self) -> int:
        return self.shard_numel * self.element_type.itemsize


class Flight(ABC):
    """One transfer that this rank takes part in. All methods raise RankError when it has failed, which names the ranks
    and the transfer."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether ``wait`` would not have to wait for another rank."""

    @abstractmethod
    def ready_within(self, limit_s: float) -> bool:
        """Wait for that in C++ at most so long. Returns ``ready()``."""

    @abstractmethod
    def wait(self) -> None:
        """Return when what this rank takes is there."""

    def arrive(self) -> None:
        """Called once, when it is ``ready``, by the thread that notices it: takes the bytes now. So the ranks that gave
        them need not wait until this rank's program comes to use them."""
        self.wait()

    def releasable(self) -> bool:
        """Whether ``release`` would not wait for another rank."""
        return self.releasable_within(0.0)

    @abstractmethod
    def releasable_within(self, limit_s: float) -> bool:
        """Wait for that in C++ at most so long, but not for what this rank takes itself. Returns ``releasable()``."""

    @abstractmethod
    def release(self) -> None:
        """Return when nobody reads any more what this rank has given, so that it may change. Waits for the transfer
        itself, too. So that nobody waits here for long, ranks take what is ready soon, and all of it before they wait
        for anything else that another rank's program does."""


class PartsFlight(Flight):
    """The parts of this rank's shard, from the ranks that contribute to it."""

    @abstractmethod
    def chunks(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Every range of the shard once, in order: its first element, and the contributors' parts in rank order.

        The tensors hold these values until the next range is asked for. The transfer has ended with the last range, so
        take all of them.
        """


class TransferSizes(Protocol):
    """What plans ask of a transport: an :class:`Exchange`, or a ``PlannedExchange`` where there are no ranks yet."""

    @property
    def transport(self) -> str:
        """``"group"`` or ``"memory"``."""

    @property
    def ranks(self) -> RankMap:
        """Who is where."""

    def scratch_bytes(self, reduction: Reduction) -> int:
        """What ``send_parts`` needs on a rank."""


class Exchange(ABC):
    """One transport between all ranks of a group.

    Attributes:
        transport: ``"group"`` or ``"memory"``.
        ready_at_launch: a transfer is ready as soon as all ranks have launched it: nothing is sent.
        ranks: who is where.
        gather_bytes: bytes of shards that this rank has got from others.
        part_bytes: bytes of contributions that this rank has got from others.
    """

    transport: str
    ready_at_launch = False

    def __init__(self, ranks: RankMap) -> None:
        self.ranks = ranks
        self.gather_bytes = 0
        self.part_bytes = 0

    @abstractmethod
    def gather(self, shard: Tensor, whole: Tensor | None, what: str, takers: Sequence[int] | None = None) -> Flight:
        """Start to bring all shards together.

        Args:
            shard: this rank's, one dimension, contiguous. It must not change before ``release``.
            whole: gets them in rank order; ``shard`` may be its own range of it. None when this rank takes nothing.
            what: for errors: what is gathered.
            takers: the ranks that take it, in order; None for all.
        """

    @abstractmethod
    def send_parts(self, contribution: Tensor | None, reduction: Reduction, scratch: Tensor, what: str) -> PartsFlight:
        """Start to send contributions to the owners of their parts.

        Args:
            contribution: this rank's, for all shards, one dimension, contiguous; None when it is not a contributor. It
                must not change before ``release``.
            scratch: ``scratch_bytes`` of uint8, which this transfer uses until its last chunk has been taken.
            what: for errors: what is reduced.
        """

    @abstractmethod
    def scratch_bytes(self, reduction: Reduction) -> int:
        """What ``send_parts`` needs on this rank."""

    @abstractmethod
    def close(self) -> None:
        """Wait until the others have taken what this rank has given, and end. Idempotent."""

    @abstractmethod
    def abandon(self) -> None:
        """End without waiting, because a rank has failed: the others, where they wait for this one, are told."""

    @abstractmethod
    def idle(self) -> bool:
        """Whether no transfer uses memory of this rank any more; before that it stays where it is. (Ranks that read
        too late get an error.)"""

    def _check_gather(self, shard: Tensor, whole: Tensor | None, what: str, takers: Sequence[int] | None) -> None:
        _check_flat(shard, f"the shard of {what}")
        if (takers is None or self.ranks.rank in takers) != (whole is not None):
            raise UsageError(f"gather of {what}: takers={takers} and whole={whole is not None} contradict each other")
        if whole is not None:
            _check_flat(whole, f"the whole copy of {what}")
            if whole.dtype != shard.dtype or whole.numel() != shard.numel() * self.ranks.world_size:
                raise UsageError(
                    f"gather of {what}: {self.ranks.world_size} shards of {shard.numel()} elements ({shard.dtype}) do "
                    f"not make {whole.numel()} ({whole.dtype})"
                )

    def _check_parts(self, contribution: Tensor | None, reduction: Reduction, scratch: Tensor, what: str) -> None:
        if (self.ranks.rank in reduction.contributors) != (contribution is not None):
            raise UsageError(
                f"reduction of {what}: contributors={reduction.contributors} and contribution="
                f"{contribution is not None} contradict each other"
            )
        if contribution is not None:
            _check_flat(contribution, f"the contribution to {what}")
            numel = reduction.shard_numel * self.ranks.world_size
            if contribution.dtype != reduction.element_type or contribution.numel() != numel:
                raise UsageError(
                    f"reduction of {what}: a contribution has {numel} elements ({reduction.element_type}), not "
                    f"{contribution.numel()} ({contribution.dtype})"
                )
        wanted = self.scratch_bytes(reduction)
        _check_flat(scratch, f"the scratch memory for {what}")
        if scratch.dtype != torch.uint8 or scratch.numel() < wanted:
            raise UsageError(
                f"reduction of {what}: it needs {wanted} bytes of scratch memory as uint8, not {scratch.numel()} "
                f"elements ({scratch.dtype})"
            )


def _check_flat(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, not one dimension")


def group_scratch_bytes(reduction: Reduction) -> int:
    """By collectives all parts arrive at once."""
    return len(reduction.contributors) * reduction.part_bytes


def memory_scratch_bytes(reduction: Reduction, rank: int) -> int:
    """From neighbours' memory ``rank`` reads a range of each part at a time."""
    rows = sum(other != rank for other in reduction.contributors)
    return rows * min(CHUNK_NUMEL, reduction.shard_numel) * reduction.element_type.itemsize


def chunk_ranges(numel: int) -> Iterator[tuple[int, int]]:
    """First element and length of each range of a shard that is handed out at a time."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, min(CHUNK_NUMEL, numel - start)
