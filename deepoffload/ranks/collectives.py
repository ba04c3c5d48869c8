"""``torch.distributed`` as this package uses it: names that differ between versions of torch, and waits that end.

Payload travels as bytes (uint8): gloo refuses int16, and no collective here adds anything up.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from deepoffload.errors import RankError

WAIT_SLICE_S = 1.0
"""A wait returns to Python this often, so that Ctrl-C is heard."""

BREAK_S = 1.0
"""How long collectives may take to end when their connections are closed. gloo has forgotten the others."""

NEVER_TAKEN = 1
"""The tag of messages that nobody receives; nobody sends any with the next one."""

Work: TypeAlias = dist.Work

Connected = TypeVar("Connected")

AnyGroup: TypeAlias = Any
"""A ``ProcessGroup``, or a ``ProcessGroupGloo`` that is in no registry; torch's stubs know no method of the latter."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor with one dimension, as uint8."""
    return tensor.view(torch.uint8)


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """``whole`` gets every rank's ``part``, in rank order; ``part`` may lie in it. Bytes."""
    # torch 2.13 has a new name for it and warns about the old one, the only one that older torches have.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(whole, part, group=group, async_op=True))


def start_broadcast(values: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """``values`` gets what it has on the rank ``source``. Bytes."""
    return cast(dist.Work, dist.broadcast(values, group=group, async_op=True, group_src=source))


def start_gather(parts: list[Tensor] | None, part: Tensor, taker: int, group: dist.ProcessGroup) -> dist.Work:
    """The rank ``taker`` gets every rank's ``part``, in rank order; ``parts`` is None on the others. Bytes."""
    return cast(dist.Work, dist.gather(part, parts, group=group, async_op=True, group_dst=taker))


def start_all_to_all(
    received: Tensor, sent: Tensor, received_bytes: Sequence[int], sent_bytes: Sequence[int], group: dist.ProcessGroup
) -> dist.Work:
    """Each rank gets its part of what each rank sends. Lengths per rank, in rank order."""
    lengths = list(received_bytes), list(sent_bytes)
    return cast(dist.Work, dist.all_to_all_single(received, sent, *lengths, group=group, async_op=True))


def finish(work: dist.Work, group: dist.ProcessGroup, timeout_s: float, waiting: str) -> None:
    """Wait for a collective of gloo, in C++ and without the GIL.

    Args:
        waiting: who waits for what, for the error.

    Raises:
        RankError: it failed, because another rank has gone for example, or has not ended within ``timeout_s``.
    """
    until = time.monotonic() + timeout_s
    try:
        while not wait_within(work, min(WAIT_SLICE_S, until - time.monotonic())):
            for rank in (gone for gone in range(group.size()) if has_gone(gone, group)):
                raise RankError(f"{waiting}: rank {rank} has gone, its connection is closed")
            if time.monotonic() >= until:
                raise RankError(f"{waiting}: not every rank has come to it within {timeout_s:g} s")
    except LinkError as error:
        raise RankError(f"{waiting}: another rank has gone or failed ({error})") from error


def has_gone(rank: int, group: AnyGroup) -> bool:
    """Whether the connection to another rank of a group of gloo is closed.

    gloo itself does not tell a collective that was in the middle of a message from a rank when that died (seen in one
    of three deaths, torch 2.13): it would wait until its own limit. But to start a message to that rank fails at once.
    One that nobody receives costs a few bytes.
    """
    if rank == group.rank():
        return False
    try:
        group.send([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, NEVER_TAKEN)
    except RuntimeError:
        return True
    return False


def break_off(group: AnyGroup, works: Sequence[dist.Work]) -> None:
    """End the collectives that are under way in a private group of gloo, here and on the ranks that wait for this one.
    Afterwards they use no memory any more. The group is of no more use.
    """
    _close_connections(group)
    until = time.monotonic() + BREAK_S
    while time.monotonic() < until and not all(is_over(work) for work in works):
        time.sleep(0.001)
    if not all(is_over(work) for work in works):
        never_end(group)


def never_end(group: AnyGroup) -> None:
    """Keep a group as long as the process lives: its destructor waits for collectives that gloo has forgotten (see
    ``has_gone``) until their limit is over, which would be minutes after an error or at the end of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _close_connections(group: AnyGroup) -> None:
    """gloo has no call for it, but when one receive takes longer than its limit, it closes all connections of the group
    (``UnboundBuffer::waitRecv``). Nobody sends with this tag."""
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):  # that one is closed already
                nothing = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, NEVER_TAKEN + 1)
                nothing.wait(timedelta(milliseconds=1))


class LinkError(RuntimeError):
    """A connection has ended: another rank has gone, or has cut its links."""


def connected_within(limit_s: float, connect: Callable[[], Connected]) -> Connected:
    """What ``connect`` returns. gloo has no limit where it waits to be called: so a thread waits for it, which is left
    behind when the limit is over.

    Raises:
        LinkError: it has not returned, or has failed.
    """
    found: list[Connected | RuntimeError] = []

    def run() -> None:
        try:
            found.append(connect())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="deepoffload-connect", daemon=True)
    thread.start()
    thread.join(limit_s)
    connected = found[0] if found else RuntimeError("not all have called")
    if isinstance(connected, RuntimeError):
        raise LinkError(first_line(connected)) from connected
    return connected


def is_over(work: dist.Work) -> bool:
    """Whether a collective of gloo has ended, well or not.

    ``work.is_completed()`` would keep the GIL while it waits for the lock of the work. While a profiler records, gloo's
    thread ends the work under that lock, and takes the GIL there to forget what the program's modes were: neither would
    get on. The future of the work has another lock.
    """
    return bool(work.get_future().done())


def wait_within(work: dist.Work, limit_s: float) -> bool:
    """Wait for a collective of gloo for at most ``limit_s``. Returns whether it is over.

    Raises:
        LinkError: it has failed.
    """
    for _ in range(2):
        try:
            work.wait(timedelta(seconds=max(limit_s, 0.001)))
            return True
        except RuntimeError as error:
            if not is_over(work):
                return False
            problem = error  # or it ended after the limit and before the question: so ask once more
    raise LinkError(first_line(problem)) from problem


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the C++ stack that follows."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
