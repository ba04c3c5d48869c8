"""Which rank runs where: what a launcher says in the environment, and which ranks share a host. Nothing here starts
anything."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepoffload.errors import ConfigError

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Launch:
    """What a launcher (torchrun, accelerate, deepspeed) says of this process, one of several.

    Attributes:
        local_rank: its number among the processes of its host, None when the launcher does not say it.
        local_world_size: how many these are, None likewise.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs, as it says itself.

    Attributes:
        first_rank: the rank of the first process of its host, by what the launcher says; None when it does not.
        local_world_size: how many processes the launcher has started on that host, None likewise.
    """

    host_name: str
    boot_id: str
    first_rank: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True)
class RankMap:
    """Who this process is among its ranks, and which of them share a host.

    Attributes:
        hosts: the number of the host of each rank. Hosts count in the order of their first ranks.
    """

    rank: int
    hosts: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def host_count(self) -> int:
        return max(self.hosts) + 1

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host, in order, this one among them."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its host, from 0 on."""
        return self.host_ranks.index(self.rank)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    said = environment.get(name, "").strip()
    if not said:
        return None
    if not said.isdecimal():
        raise ConfigError(f"{name}={said} in the environment is not a number; a launcher such as torchrun sets it")
    return int(said)


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """What the environment says; None when it does not say that this process is one of several.

    Raises:
        ConfigError: the variables contradict each other, or RANK is missing.
    """
    said = environment.get("WORLD_SIZE", "").strip()
    if not said.isdecimal() or int(said) <= 1:
        return None
    world_size, rank = int(said), _number(environment, "RANK")
    local_rank, local_world_size = (_number(environment, name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank is None:
        raise ConfigError(
            f"WORLD_SIZE={world_size} in the environment, but no RANK: which of the {world_size} processes is this? "
            "Start them with torchrun, or unset WORLD_SIZE where the processes are meant to be independent"
        )
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world_size} in the environment contradict each other")
    if local_world_size is not None and local_rank is not None:
        if not (local_rank < local_world_size <= world_size and local_rank <= rank):
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}, RANK={rank} and "
                f"WORLD_SIZE={world_size} in the environment contradict each other"
            )
    return Launch(rank, world_size, local_rank, local_world_size)


def this_place(launch: Launch | None) -> RankPlace:
    """Where this process runs."""
    try:
        with open(BOOT_ID_PATH, encoding="ascii") as boot:
            boot_id = boot.read().strip()
    except OSError:
        boot_id = ""  # some containers hide it: the host's name has to do
    if launch is None or launch.local_rank is None or launch.local_world_size is None:
        return RankPlace(platform.node(), boot_id)
    return RankPlace(platform.node(), boot_id, launch.rank - launch.local_rank, launch.local_world_size)


def _launcher_is_right(places: Sequence[RankPlace]) -> bool:
    """Whether every rank says which ranks its launcher has started on its host, and that can be so. It is not where
    neighbours have ranks that do not follow each other, as some launchers of clusters number them."""
    groups: dict[int, list[RankPlace]] = {}
    for place in places:
        if place.first_rank is None or place.local_world_size is None:
            return False
        groups.setdefault(place.first_rank, []).append(place)
    return all(len(set(group)) == 1 and len(group) <= (group[0].local_world_size or 0) for group in groups.values())


def tell_hosts_apart(places: Sequence[RankPlace]) -> tuple[int, ...]:
    """The number of the host of each rank: by what the launcher says, else by host name and boot."""
    by_launcher = _launcher_is_right(places)
    keys = [(place.first_rank,) if by_launcher else (place.host_name, place.boot_id) for place in places]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)
