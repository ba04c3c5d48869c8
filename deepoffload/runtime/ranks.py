"""How many processes train together. This version offloads on one rank only."""

from __future__ import annotations

import os

from deepoffload.errors import ConfigError
from deepoffload.ranks.group import default_world_size


def refuse_several_ranks() -> None:
    """Raise ConfigError where this process is one of several: each would train a separate model.

    A launcher (torchrun, accelerate, deepspeed) says so in ``WORLD_SIZE``, also when no process group was made. What
    schedulers of clusters set is not asked: an interactive shell under Slurm has ``SLURM_NTASKS``, too.
    """
    world_size = default_world_size()
    if world_size is not None:
        if world_size > 1:
            raise ConfigError(f"torch.distributed runs with {world_size} ranks; this version offloads on one rank only")
        return
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdecimal() and int(said) > 1:
        rank = os.environ.get("RANK")
        which = "one" if rank is None else f"rank {rank}"
        raise ConfigError(
            f"WORLD_SIZE={said} in the environment: a launcher (torchrun, accelerate, deepspeed) has started this "
            f"process as {which} of {said}. This version offloads on one rank only, and the processes would train "
            "models that know nothing of each other. Launch one process (--nproc_per_node 1, --num_processes 1, "
            "--num_gpus 1), or unset WORLD_SIZE where the processes are meant to be independent"
        )
