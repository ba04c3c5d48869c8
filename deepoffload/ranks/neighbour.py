"""Ranks of one host read each other's memory, if the system lets them: found out by doing it.

Capabilities and settings do not tell: containers filter the system call, users differ, programs forbid it. So each rank
reads the token of each other's board.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from deepoffload.errors import RankError
from deepoffload.native.neighbour import Board, BoardAddress, NeighbourMemory, allow_readers, readers_need_leave
from deepoffload.ranks.group import RankGroup

REASONS = {
    errno.EPERM: "the system forbids it (a container's seccomp filter, another user, or prctl(PR_SET_DUMPABLE))",
    errno.EACCES: "the system forbids it (a container's seccomp filter, another user, or prctl(PR_SET_DUMPABLE))",
    errno.ESRCH: "it has gone, or it lives in another container",
    errno.ESTALE: "another process has its number: it has gone, or it lives in another container",
    errno.ENOSYS: "this kernel cannot do it",
    errno.ESHUTDOWN: "it has ended its training",
    errno.EFAULT: "what it has offered is not in its memory any more",
    errno.EPROTO: "it is further than this rank: they have started different transfers",
}


def reason(error: OSError) -> str:
    """What a failed call to a neighbour means."""
    code = error.errno or 0
    return f"{REASONS.get(code, error.strerror)} ({errno.errorcode.get(code, code)})"


@dataclass(frozen=True)
class Neighbours:
    """The other ranks of this host.

    Attributes:
        memories: of each rank; None at this rank's own place.
    """

    board: Board
    memories: tuple[NeighbourMemory | None, ...]

    def others(self) -> list[tuple[int, NeighbourMemory]]:
        """Rank and memory, the next rank first: so not all of them read the same one at the same time."""
        own = self.memories.index(None)
        order = [*range(own + 1, len(self.memories)), *range(own)]
        return [(rank, memory) for rank in order if (memory := self.memories[rank]) is not None]


def let_others_read() -> None:
    """Allow it where yama asks for that. It stays allowed: other engines of this process may need it."""
    if readers_need_leave():
        allow_readers(True)


def meet(group: RankGroup, board: Board, addresses: Sequence[BoardAddress]) -> tuple[Neighbours, str | None]:
    """The neighbours, and why they cannot read each other's memory: None when each has read each other's token.
    Collective; every rank gets the same reason.

    Args:
        addresses: of the board of every rank, in rank order. All ranks are on this host.
    """
    own = group.ranks.rank
    neighbours = Neighbours(
        board, tuple(None if rank == own else NeighbourMemory(address) for rank, address in enumerate(addresses))
    )
    failed = None
    for rank, memory in neighbours.others():
        try:
            memory.probe()
        except OSError as error:
            failed = f"rank {own} cannot read the memory of rank {rank}: {reason(error)}"
            break
    verdicts = group.gather_objects(failed, "reading the neighbours' memory")
    return neighbours, next((verdict for verdict in verdicts if verdict), None)


def failure(error: OSError, waiting: str, rank: int) -> RankError:
    """What this rank raises when it was at ``waiting`` and could not read from another."""
    return RankError(f"{waiting}: rank {rank} cannot be read: {reason(error)}")
