"""Which ranks train a model together: what the program says, and what it leaves to its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepoffload.config import Config
from deepoffload.errors import ConfigError
from deepoffload.ranks.group import RankGroup, default_world_size, world_size_of

LOCAL = "local"

LAUNCHERS = {
    "WORLD_SIZE": ("RANK", "a launcher (torchrun, accelerate, deepspeed)"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec"),
}
"""Where a launcher says how many processes it has started, where it says which one this is, and who it is. The first
that is there decides."""


class RankChoice:
    """The ranks of one model, as ``offload_context`` and ``initialize`` are told.

    Args:
        group, mesh: a process group or a mesh with one dimension; both None: the default group.
        ranks: ``"local"``: this process has its model for itself. Else the section ``ranks`` of the configuration.

    Attributes:
        settings: what of it belongs to the configuration.
        world_size: how many ranks they are.

    Raises:
        ConfigError, UsageError: they contradict each other, or the environment. Nothing has been started.
    """

    def __init__(self, group: Any = None, mesh: Any = None, ranks: str | Mapping[str, Any] | None = None) -> None:
        if isinstance(ranks, str) and ranks != LOCAL:
            raise ConfigError(
                f'ranks = {ranks!r}: expected "local" for a model that this process has for itself, or the section '
                'ranks of the configuration, such as {"timeout_s": 60}'
            )
        self._is_local = isinstance(ranks, str)
        if self._is_local and (group is not None or mesh is not None):
            given = "mesh" if group is None else "group"
            raise ConfigError(f'ranks="local" and {given}= contradict each other: leave one of them out')
        self._group, self._mesh = group, mesh
        self.settings: dict[str, Any] = {} if ranks is None or self._is_local else {"ranks": ranks}
        self.world_size = 1 if self._is_local else world_size_of(group, mesh)

    @property
    def is_said(self) -> bool:
        """Whether the program says anything about ranks."""
        return self._is_local or bool(self.settings) or self._group is not None or self._mesh is not None

    def open(self, config: Config) -> RankGroup | None:
        """The ranks that train with this one; None where it trains alone. Collective."""
        if self._is_local:
            return None
        refuse_several_ranks()
        return None


def refuse_several_ranks() -> None:
    """Raise ConfigError where this process is one of several: each would train a separate model.

    A launcher says so in the environment, also when no process group was made. What schedulers of clusters set is not
    asked: an interactive shell under Slurm has ``SLURM_NTASKS``, too.
    """
    world_size = default_world_size()
    if world_size is not None:
        if world_size > 1:
            raise ConfigError(
                f"torch.distributed runs with {world_size} ranks; this version offloads on one rank only. "
                'ranks="local" pages the model of this process for itself'
            )
        return
    name = next((name for name in LAUNCHERS if os.environ.get(name)), None)
    if name is None:
        return
    said, (number, launcher) = os.environ[name], LAUNCHERS[name]
    if said.isdecimal() and int(said) > 1:
        rank = os.environ.get(number)
        which = "one" if rank is None else f"rank {rank}"
        raise ConfigError(
            f"{name}={said} in the environment: {launcher} has started this process as {which} of {said}. This "
            "version offloads on one rank only, and the processes would train models that know nothing of each other. "
            f"Launch one process (--nproc_per_node 1, --num_processes 1, --num_gpus 1, -n 1), unset {name}, or say "
            'ranks="local", where the processes are meant to be independent'
        )
