"""Which transport carries the payload: the neighbours' memory where all ranks can read it, else collectives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.native.neighbour import Board, BoardAddress
from deepoffload.ranks.exchange import Exchange
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.group_exchange import GroupExchange
from deepoffload.ranks.memory_exchange import MemoryExchange
from deepoffload.ranks.neighbour import let_others_read, meet, reason
from deepoffload.ranks.places import RankMap

log = logging.getLogger("deepoffload")

AUTO, GROUP, MEMORY = TRANSPORTS = ("auto", "group", "memory")


@dataclass(frozen=True)
class TransportChoice:
    """``transport`` is ``"group"`` or ``"memory"``; ``reason`` says why, for people."""

    transport: str
    reason: str


@dataclass(frozen=True)
class _Card:
    """What ranks tell each other before they choose."""

    asked: str
    board: BoardAddress


def agree(asked: Sequence[str]) -> str:
    """What all ranks ask for.

    Raises:
        ConfigError: they differ, or it is none of ``TRANSPORTS``.
    """
    differs = next((rank for rank, name in enumerate(asked) if name != asked[0]), None)
    if differs is not None:
        raise ConfigError(f"ranks.transport: rank 0 has {asked[0]!r} and rank {differs} has {asked[differs]!r}")
    if asked[0] not in TRANSPORTS:
        raise ConfigError(f"ranks.transport: {asked[0]!r} is none of {', '.join(TRANSPORTS)}")
    return asked[0]


def why_not_memory(ranks: RankMap, device: torch.device) -> str | None:
    """What speaks against the neighbours' memory before anybody has tried to read it."""
    if ranks.host_count > 1:
        return f"the ranks run on {ranks.host_count} hosts"
    if device.type != "cpu":
        return f"the tensors are on {device.type}"
    return None


def choose(asked: str, obstacle: str | None) -> TransportChoice:
    """The transport, from what the configuration asks for and what speaks against the neighbours' memory.

    Raises:
        UnsupportedError: ``memory`` is asked for and cannot be.
    """
    if asked == GROUP:
        return TransportChoice(GROUP, "ranks.transport asks for it")
    if obstacle is None:
        return TransportChoice(MEMORY, "every rank can read the memory of the others")
    if asked == MEMORY:
        raise UnsupportedError(
            f"ranks.transport asks for 'memory', but {obstacle}. Ask for 'auto' or 'group', or run the ranks on one "
            "host as one user, in a container that allows process_vm_readv (docker: --cap-add SYS_PTRACE)"
        )
    return TransportChoice(GROUP, obstacle)


def open_exchange(group: RankGroup, transport: str = AUTO, num_threads: int = 1) -> Exchange:
    """The transport between the ranks of a group. Collective; all ranks choose the same one, and rank 0 logs which.

    Args:
        transport: ``"auto"``, ``"group"`` or ``"memory"``.
        num_threads: of copies inside a rank's memory.

    Raises:
        ConfigError: ranks ask for different transports, or for one that does not exist.
        UnsupportedError: ``"memory"`` is asked for and cannot be. On all ranks.
        RankError: a rank does not come.
    """
    board = Board()
    obstacle = why_not_memory(group.ranks, group.device)
    if transport != GROUP and obstacle is None:
        try:
            let_others_read()
        except OSError as error:
            log.debug("prctl(PR_SET_PTRACER) failed: %s", reason(error))  # reading shows whether it matters
    cards: list[_Card] = group.gather_objects(_Card(transport, board.address), "choosing a transport")
    asked = agree([card.asked for card in cards])
    neighbours = None
    if asked != GROUP and obstacle is None:
        neighbours, obstacle = meet(group, board, [card.board for card in cards])
    choice = choose(asked, obstacle)
    if group.ranks.rank == 0:
        log.info("payload between ranks goes by %s: %s", choice.transport, choice.reason)
    if choice.transport == MEMORY:
        assert neighbours is not None, "chosen only after reading"
        return MemoryExchange(group.ranks, neighbours, group.timeout_s, num_threads)
    return GroupExchange(group)
