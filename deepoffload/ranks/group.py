"""The ranks that train one model: found, or started as the environment says, with process groups that only we use.

Two collectives in one group meet each other, also when one is a barrier of the program and the other a transfer of
ours. So each of our purposes has a private group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepoffload.errors import ConfigError, DeepOffloadError, RankError, UnsupportedError, UsageError
from deepoffload.ranks.collectives import LinkError, connected_within, first_line
from deepoffload.ranks.elsewhere import ANSWERS_WITHIN_S, WaitsAcrossModels
from deepoffload.ranks.limited_store import LimitedStore
from deepoffload.ranks.links import own_client
from deepoffload.ranks.openings import Openings
from deepoffload.ranks.places import Launch, RankMap, read_launch, tell_hosts_apart, this_place

DEVICE_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""With which backends the default group is started for a device."""


CONNECT_S = 60.0
"""Ranks that have all come are connected much sooner than this, or not at all."""
LATE_S = 5.0
"""torch's own limit ends a wait before ours does, where it can: it says more."""


class RankGroup:
    """This process among its ranks. Ranks count from 0 in the order that they have in the default group.

    Opening one, making private groups and ``gather_objects`` are collective: every rank calls them, in the same order.

    Attributes:
        ranks: who is where.
        device: where the payload's tensors lie.
        timeout_s: the limit of every wait in the groups.
        values_of_rank_0: whether all ranks get rank 0's values of a model of which they have built different ones.
            Else that is an error.
    """

    values_of_rank_0 = False

    def __init__(
        self, parent: dist.ProcessGroup, device: torch.device, launch: Launch | None, timeout_s: float
    ) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self._members = sorted(dist.get_process_group_ranks(parent))
        self._private: list[dist.ProcessGroup] = []
        self._device_backend = _backends(parent).get(device.type, "gloo")
        _openings().come(self._members, timeout_s)
        self._control = self.new_private_group("control")
        self._client = own_client(self._control.get_group_store())
        rank = dist.get_rank(self._control)
        self.ranks = RankMap(rank, tuple(range(len(self._members))))
        places = self.gather_objects(this_place(launch), "telling hosts apart")
        self.ranks = RankMap(rank, tell_hosts_apart(places))

    def new_private_group(
        self, purpose: str, *, on_device: bool = False, timeout_s: float | None = None
    ) -> dist.ProcessGroup:
        """A group of the same ranks that only its maker uses: of gloo, or ``on_device`` of what moves bytes there.

        Args:
            timeout_s: torch's limit for its collectives; that of all groups when not given.

        Raises:
            RankError: not every rank has come to it within ``timeout_s``.
        """
        backend = self._device_backend if on_device and self.device.type != "cpu" else "gloo"
        limit_s = self.timeout_s if timeout_s is None else timeout_s

        def connect() -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(
                self._members,
                timeout=timedelta(seconds=limit_s),
                backend=backend,
                # ranks of other groups do not come here
                use_local_synchronization=len(self._members) < dist.get_world_size(),
                group_desc=f"deepoffload {purpose}",
            )
            return made

        try:
            # A device's backend is connected by the thread that has made its device the current one.
            group = connected_within(self.timeout_s + LATE_S, connect) if backend == "gloo" else connect()
            if self._private:
                # All have connected: a rank that closes the new group at once ends nobody's connecting.
                dist.barrier(self._control)
        except RuntimeError as error:
            raise RankError(
                f"rank {dist.get_rank()} at making the group for {purpose} with ranks {self._members}: not every rank "
                f"has come to it within {self.timeout_s:g} s, or one has gone ({first_line(error)})"
            ) from error
        self._private.append(group)
        return group

    def client(self, purpose: str) -> dist.Store:
        """What all ranks can read and write: keys that only ``purpose`` uses. By a connection of our own that all
        purposes share, as it may take seconds to make one. So no call waits for a key, once the model trains."""
        return dist.PrefixStore(purpose, self._client)

    def elsewhere(self) -> WaitsAcrossModels:
        """Of all models of these ranks together."""
        world: Any = dist.group.WORLD
        store = dist.PrefixStore(f"deepoffload models of {self._members}", world.get_group_store())
        return WaitsAcrossModels(
            LimitedStore(own_client(store), ANSWERS_WITHIN_S), self.ranks.rank, self.ranks.world_size
        )

    def gather_objects(self, mine: Any, what: str) -> list[Any]:
        """What every rank gives, in rank order. For a few objects at the start: they are pickled.

        Raises:
            RankError: a rank has gone, or has not come to it within ``timeout_s``.
        """
        given: list[Any] = [None] * self.ranks.world_size
        try:
            dist.all_gather_object(given, mine, group=self._control)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.ranks.rank} at {what}: another rank has gone, or has not come to it within "
                f"{self.timeout_s:g} s ({first_line(error)})"
            ) from error
        return given

    def close(self) -> None:
        """End the private groups. The default group stays for the program, also when we have started it: it ends with
        the process then. Idempotent."""
        ended = len(self._private)
        while self._private:
            with contextlib.suppress(ValueError, AssertionError):  # the program has ended all groups already
                dist.destroy_process_group(self._private.pop())
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):  # and perhaps the store has gone
            if len(self._members) < dist.get_world_size():
                self._keep_names(ended)

    @staticmethod
    def _keep_names(count: int) -> None:
        """A group that has ended leaves addresses in the store, under its name. torch names groups that not all ranks
        make by their members and by how many groups there are. The next ones would have the same names, and their ranks
        would look for each other at the old addresses. Groups of this rank alone keep the number."""
        for _ in range(count):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _openings() -> Openings:
    """Of all models of the program."""
    world: Any = dist.group.WORLD
    return Openings(dist.PrefixStore("deepoffload openings", world.get_group_store()), dist.get_rank())


def default_world_size() -> int | None:
    """How many ranks the program's default group has; None when there is no such group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def default_group() -> dist.ProcessGroup | None:
    """The program's default group; None when there is no such group."""
    return dist.group.WORLD if default_world_size() is not None else None


def open_group(
    device: torch.device,
    computes_on: torch.device | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: Any = None,
    timeout_s: float = 600.0,
) -> RankGroup | None:
    """The ranks that this process trains with; None when it trains alone.

    They are those of ``group`` or of a ``mesh`` with one dimension, else those of the default group. If there is none
    and the environment says that this process is one of several, the default group is started: gloo for a CPU, gloo and
    NCCL for CUDA.

    Args:
        device: where the payload's tensors lie.
        computes_on: on what the program computes, where that is another device: the default group is started for it.
            A group that the program has started need not know ``device`` then, since our payload has its own groups.
        timeout_s: the limit of every wait in our groups.

    Raises:
        ConfigError: variables of the environment contradict each other or the default group, ``mesh`` has several
            dimensions, or the group's backend does not know the device. Nothing has been started then.
        UsageError: this rank is not in the group or mesh that was given.
        UnsupportedError: this torch has no distributed package.
        RankError: the other ranks do not come.
    """
    launch = read_launch(os.environ)
    found = _find_group(launch, group, mesh)
    if found is None and launch is not None:
        _start_default_group(device if computes_on is None else computes_on, launch, timeout_s)
        found = dist.group.WORLD
    if found is None or dist.get_world_size(found) == 1:
        return None
    if computes_on is None or computes_on.type == device.type:
        _check_backend(found, device)
    return RankGroup(found, device, launch, timeout_s)


def tell_failure(
    error: tuple[str, str, str],
    computes_on: torch.device,
    choice: tuple[Any, Any],
    *,
    is_known: bool,
    limit_s: float,
    heard_within_s: float,
) -> DeepOffloadError | None:
    """Tell those that open a group with this rank that it does not, and why. Starts the default group as
    :func:`open_group` does.

    Args:
        error: its class, at what, and its text.
        choice: group and mesh that the program has given.
        is_known: they say who trains with this rank; else that is what is wrong.
        limit_s: of starting the default group.
        heard_within_s: how long the others may take to hear it.

    Returns:
        What all of them raise; None where there is nobody, or all have failed alike.

    Raises:
        DeepOffloadError: others are not reached.
    """
    launch = read_launch(os.environ)
    found = _find_group(launch, *(choice if is_known else (None, None)))
    if found is None and launch is not None:
        _start_default_group(computes_on, launch, limit_s)
        found = dist.group.WORLD
    if found is None or dist.get_world_size(found) == 1:
        return None
    members = sorted(dist.get_process_group_ranks(found))
    if is_known:
        return _openings().fail(error, members, members, heard_within_s)
    return _openings().fail(error, None, _named_by(*choice) or members, heard_within_s)


def _named_by(group: Any, mesh: Any) -> list[int]:
    """The ranks that a wrong choice names; none where this rank is not one of them."""
    found: list[int] = []
    if isinstance(mesh, dist.DeviceMesh):
        found = mesh.mesh.flatten().tolist()
    elif isinstance(group, dist.ProcessGroup):
        found = dist.get_process_group_ranks(group)
    return found if dist.get_rank() in found else []


def world_size_of(group: dist.ProcessGroup | None = None, mesh: Any = None) -> int:
    """How many ranks ``open_group`` finds. Starts nothing. Raises what that raises before it starts anything."""
    launch = read_launch(os.environ)
    found = _find_group(launch, group, mesh)
    if found is not None:
        return int(dist.get_world_size(found))
    return 1 if launch is None else launch.world_size


def _find_group(launch: Launch | None, group: Any, mesh: Any) -> dist.ProcessGroup | None:
    """The group that is there: the one that was given, or the default one."""
    if not dist.is_available():
        if launch is not None or group is not None or mesh is not None:
            raise UnsupportedError("this build of torch has no torch.distributed: install one that has, or train alone")
        return None
    if group is not None and mesh is not None:
        raise ConfigError("group= and mesh= both say which ranks train this model: give one of them")
    if mesh is not None:
        group = _group_of(mesh)
    if group is not None:
        _check_membership(group)
        given: dist.ProcessGroup = group
        return given
    if dist.is_initialized():
        _check_launch(launch)
        return dist.group.WORLD
    return None


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if not isinstance(mesh, dist.DeviceMesh):
        raise ConfigError(f"mesh= takes a torch.distributed DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f"mesh[{names[0]!r}]" if names else "one that was made with mesh_dim_names, by a name"
        raise ConfigError(
            f"mesh= has {mesh.ndim} dimensions{f' {names}' if names else ''}; a model is partitioned over one. Give "
            f"the dimension of its data-parallel ranks, for example {one}"
        )
    if mesh.get_coordinate() is None:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the mesh that was given (ranks {mesh.mesh.flatten().tolist()}): only "
            "the ranks of a mesh build the model that is partitioned over it"
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _check_membership(group: Any) -> None:
    if not dist.is_initialized():
        raise UsageError("group= or mesh= was given, but torch.distributed has not been started, or has been ended")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            f"rank {dist.get_rank()} is not in the group that was given: only the ranks of a group build the model "
            "that is partitioned over it"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"group= takes a torch.distributed process group, not {type(group).__name__}")


def _check_launch(launch: Launch | None) -> None:
    """The default group that the program has started is the one that its launcher means."""
    found = dist.get_rank(), dist.get_world_size()
    if launch is not None and (launch.rank, launch.world_size) != found:
        raise ConfigError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} in the environment, but the default process group "
            f"has this process as rank {found[0]} of {found[1]}. Give group=torch.distributed.group.WORLD where that "
            "is meant, or let init_process_group read the environment (init_method='env://')"
        )


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each type of device."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(",") if pair)
    return {device: backend for device, _, backend in pairs}


def _check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    backends = _backends(group)
    if device.type not in backends:
        known = ", ".join(f"{backend} for {kind}" for kind, backend in backends.items())
        wanted = DEVICE_BACKENDS.get(device.type, device.type)
        raise ConfigError(
            f"the process group has no backend for tensors on {device.type} (it has {known}), where this model "
            f"computes. Start it with init_process_group({wanted!r}), or let deepoffload start it"
        )


def _backends_for(device_type: str) -> str:
    """Those of the default group: of a device that torch knows, and gloo for the CPU."""
    known = dist.Backend.default_device_backend_map.get(device_type)
    return "gloo" if known is None else f"cpu:gloo,{device_type}:{known}"


def _start_default_group(device: torch.device, launch: Launch, timeout_s: float) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={launch.world_size} in the environment, but no {' and no '.join(missing)}: where do the ranks "
            "meet? Start them with torchrun, or call torch.distributed.init_process_group before"
        )
    backend = DEVICE_BACKENDS.get(device.type) or _backends_for(device.type)
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = _meeting_point(launch, timeout_s, where)
        connected = _connect(store, launch, min(timeout_s, CONNECT_S), where)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        del connected  # only now have all ranks seen that all are connected
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {launch.rank} has not met the {launch.world_size - 1} other ranks at {where} within {timeout_s:g} s "
            f"(ranks.timeout_s): {first_line(error)}"
        ) from error
    atexit.register(_end_default_group, os.getpid())


def _meeting_point(launch: Launch, timeout_s: float, where: str) -> dist.Store:
    """The store that the launcher's environment leads to, when every rank has come to it. torch itself would wait for
    half an hour for a rank that trains alone.

    Raises:
        RankError: ranks have not come within ``timeout_s``; it names them.
    """
    limit = timedelta(seconds=timeout_s)
    found: tuple[dist.Store, int, int] = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=limit))
    store = found[0]
    come = dist.PrefixStore("deepoffload has come", store)
    come.set(str(launch.rank), "")
    others = [rank for rank in range(launch.world_size) if rank != launch.rank]
    try:
        come.wait([str(rank) for rank in others], limit)
    except RuntimeError as error:
        missing = [rank for rank in others if not come.check([str(rank)])]
        raise RankError(
            f"rank {launch.rank} at {where}: {_numbers(missing)} not come within {timeout_s:g} s (ranks.timeout_s). "
            'Every process that the launcher has started builds the model, or none: is one at ranks="local"?'
        ) from error
    return store


def _connect(store: dist.Store, launch: Launch, limit_s: float, where: str) -> dist.ProcessGroupGloo:
    """Connect to every rank, within a limit.

    Raises:
        RankError: they do not reach each other.
    """
    place = dist.PrefixStore("deepoffload connects", store)

    def connect() -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(place, launch.rank, launch.world_size, timedelta(seconds=limit_s))

    try:
        return connected_within(limit_s, connect)
    except LinkError as error:
        raise RankError(
            f"rank {launch.rank} has met the others at {where}, and gloo has not connected it to all of them within "
            f"{limit_s:g} s: {error}. gloo listens on the address to which the name of this host, {platform.node()}, "
            "resolves. If other hosts cannot reach that, name the network interface in GLOO_SOCKET_IFNAME, for "
            "example eth0"
        ) from error


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"


def _end_default_group(process: int) -> None:
    """At the end of a process whose default group we have started: torch warns about groups that are left. A forked
    child leaves the parent's alone."""
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()
