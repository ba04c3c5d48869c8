"""What rounds are carried by: two gloo groups that only we use, one for rounds and one for nudges.

A collective of the program, or one of our payloads, would meet ours in a group that they share. Waits are gloo's, in
C++ and without the GIL. gloo's own limits are out of reach: a round is under way for as long as a program computes, and
how long anybody waits for one is the caller's to limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepoffload.ranks.collectives import (
    AnyGroup,
    LinkError,
    break_off,
    connected_within,
    first_line,
    has_gone,
    is_over,
    never_end,
    wait_within,
)

FOREVER = timedelta(days=365)
ROUND_NUMEL = 6
"""Numbers (int64) that a rank sends in a round."""
NUDGE_NUMEL = 4
"""The same of a nudge."""


def _joined(purpose: str, store: dist.Store, member: int, members: int, timeout_s: float) -> AnyGroup:
    """A group of gloo's, without a place in the registry of ``torch.distributed``: it outlives the program's groups."""
    place, limit = dist.PrefixStore(purpose, store), timedelta(seconds=timeout_s)
    try:
        return connected_within(timeout_s, lambda: dist.ProcessGroupGloo(place, member, members, limit))
    except LinkError as error:
        raise LinkError(f"not every rank has come within {timeout_s:g} s ({error})") from error


def own_client(store: dist.Store) -> dist.Store:
    """The same store by its own connection. torch's stubs do not know the method."""
    client: Any = store
    return client.clone()  # type: ignore[no-any-return]


class RoundLink:
    """A few numbers from every rank to every rank, one exchange at a time.

    Every rank sends to every other rank itself (an all-to-all). gloo's all-gather passes the numbers on in a ring: with
    four ranks that takes several times as long, in CPU time, too.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._group = _joined("rounds", store, rank, world_size, timeout_s)
        self._options = dist.AllToAllOptions()
        self._options.timeout = FOREVER
        self._sent = torch.zeros(world_size, ROUND_NUMEL, dtype=torch.int64, device="cpu")
        self._words = self._sent.numpy()  # the same memory; a twentieth of the time
        self._received = torch.zeros(world_size, ROUND_NUMEL, dtype=torch.int64, device="cpu")
        self._work: dist.Work | None = None

    def start(self, message: Sequence[int]) -> None:
        """Send ``message`` to all ranks.

        Raises:
            LinkError: a connection has ended.
        """
        assert self._work is None, "an exchange is under way"
        if self._group is None:
            raise LinkError("the links of this rank are cut")
        self._words[:] = message
        try:
            self._work = self._group.alltoall_base(self._received.view(-1), self._sent.view(-1), [], [], self._options)
        except RuntimeError as error:
            raise LinkError(first_line(error)) from error

    @property
    def work(self) -> dist.Work | None:
        """The exchange under way, to wait for; None when there is none."""
        return self._work

    def is_over(self) -> bool:
        """Whether :meth:`take` does not wait."""
        return self._work is not None and is_over(self._work)

    def take(self) -> list[list[int]]:
        """The messages of all ranks, in rank order.

        Raises:
            LinkError: a connection has ended.
        """
        assert self._work is not None, "no exchange is under way"
        work, self._work = self._work, None
        wait_within(work, FOREVER.total_seconds())
        messages: list[list[int]] = self._received.tolist()
        return messages

    def cut(self) -> None:
        """End the connections. All that waits for an exchange with this rank fails, here and on the other ranks."""
        group, self._group = self._group, None
        if group is not None and self._work is not None:
            break_off(group, [self._work])


class NudgeLink:
    """Short messages to ranks whose programs are elsewhere. Each rank is two members of the group: one that listens,
    and one that sends. So it can send a message to itself, which is how the thread that listens is ended.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        # Each member waits for all others, so the two must not wait for each other; also not for their turn with the
        # store, which a client of a TCPStore has for as long as it waits.
        with ThreadPoolExecutor(1) as other:
            listening = other.submit(_joined, "nudges", own_client(store), 2 * rank, 2 * world_size, timeout_s)
            sending = _joined("nudges", store, 2 * rank + 1, 2 * world_size, timeout_s)
            self._groups = [listening.result(), sending]
        self._received = torch.zeros(NUDGE_NUMEL, dtype=torch.int64, device="cpu")
        self._sent: dict[tuple[int, int], tuple[torch.Tensor, dist.Work]] = {}

    def send(self, rank: int, message: Sequence[int]) -> bool:
        """Send ``message`` to one rank, this one included. Returns False where that rank, or the link, has gone.

        gloo sends it when that rank receives it, and forgets it when its memory goes; that rank then waits for it in
        vain. So no message goes to a rank before it has received the last one with the same first word.
        """
        if not self._groups:
            return False
        words = torch.tensor(message, dtype=torch.int64, device="cpu")
        try:
            work = self._groups[1].send([words], 2 * rank, 0)
        except RuntimeError:
            return False
        self._sent[rank, message[0]] = words, work
        return True

    def reaches(self, rank: int) -> bool:
        """Whether another rank's connection is open."""
        return bool(self._groups) and not has_gone(2 * rank, self._groups[1])

    def receive(self) -> list[int]:
        """Sleep until a message comes. For one thread alone.

        Raises:
            LinkError: the link is broken.
        """
        try:
            self._groups[0].recv_anysource([self._received], 0).wait(FOREVER)
        except RuntimeError as error:
            raise LinkError(first_line(error)) from error
        message: list[int] = self._received.tolist()
        return message

    def close(self, *, stays_connected: bool) -> None:
        """End the connections, or leave that to the end of the process. Nobody may be in :meth:`receive`."""
        if stays_connected:
            for group in self._groups:
                never_end(group)
        self._sent.clear()
        self._groups.clear()
