"""How many processes train together. This version offloads on one rank only."""

from __future__ import annotations

import os

from deepoffload.errors import ConfigError
from deepoffload.ranks.group import default_world_size

LAUNCHERS = {
    "WORLD_SIZE": ("RANK", "a launcher (torchrun, accelerate, deepspeed)"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec"),
}
"""Where a launcher says how many processes it has started, where it says which one this is, and who it is. The first
that is there decides."""


def refuse_several_ranks() -> None:
    """Raise ConfigError where this process is one of several: each would train a separate model.

    A launcher says so in the environment, also when no process group was made. What schedulers of clusters set is not
    asked: an interactive shell under Slurm has ``SLURM_NTASKS``, too.
    """
    world_size = default_world_size()
    if world_size is not None:
        if world_size > 1:
            raise ConfigError(f"torch.distributed runs with {world_size} ranks; this version offloads on one rank only")
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
            f"Launch one process (--nproc_per_node 1, --num_processes 1, --num_gpus 1, -n 1), or unset {name} where "
            "the processes are meant to be independent"
        )
