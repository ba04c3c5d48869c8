"""Which ranks train a model together: what the program says, and what it leaves to its launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from deepoffload.config import Config
from deepoffload.errors import ConfigError, DeepOffloadError, UsageError
from deepoffload.ranks.group import RankGroup, default_world_size, open_group, tell_failure, world_size_of
from deepoffload.runtime.agreement import told_of
from deepoffload.runtime.announce import announce
from deepoffload.runtime.device import CPU, device_of

log = logging.getLogger("deepoffload")

LOCAL = "local"

TELL_S = 30.0
"""How long a rank that fails before there is a default group waits for the others, to start it and to tell them."""
HEARD_WITHIN_S = 5.0
"""How long they may take to hear it. Who comes later hears it, too, but this rank does not wait for that."""

LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec"),
}
"""Where launchers that torch does not know say how many processes they have started, where they say which one this is,
and who they are. The first that is there decides."""


class RankChoice:
    """The ranks of one model, as ``offload_context`` and ``initialize`` are told.

    Args:
        group, mesh: a process group or a mesh with one dimension; both None: the default group.
        ranks: ``"local"``: this process has its model for itself. Else the section ``ranks`` of the configuration.
        values_of_rank_0: all ranks get the values that rank 0 has built, where they have built different ones.

    Attributes:
        settings: what of it belongs to the configuration.
        world_size: how many ranks they are.

    Raises:
        ConfigError: they contradict each other, or the environment.
        UsageError: this rank is not in the group or mesh. Those that wait for it are told, as with all that fails here.
    """

    def __init__(
        self,
        group: Any = None,
        mesh: Any = None,
        ranks: str | Mapping[str, Any] | None = None,
        *,
        values_of_rank_0: bool = False,
    ) -> None:
        self._is_local = isinstance(ranks, str)
        self._group, self._mesh = group, mesh
        self._values_of_rank_0 = values_of_rank_0
        self.settings: dict[str, Any] = {} if ranks is None or self._is_local else {"ranks": ranks}
        self._is_known = True
        try:
            _check_words(group, mesh, ranks)
            self.world_size = 1 if self._is_local else world_size_of(group, mesh)
        except (ConfigError, UsageError):
            self.world_size = self._who_can_hear()
            with self.telling("reading group=, mesh= and ranks="):
                raise

    def _who_can_hear(self) -> int:
        """How many ranks those are that this one tells of its failure, this one among them."""
        if self._group is not None or self._mesh is not None:
            with suppress(DeepOffloadError):
                return world_size_of(self._group, self._mesh)
        self._is_known = False
        with suppress(DeepOffloadError):
            return world_size_of()
        return 1  # the environment does not say where others are

    @property
    def is_said(self) -> bool:
        """Whether the program says anything about ranks."""
        return self._is_local or bool(self.settings) or self._group is not None or self._mesh is not None

    def open(self, config: Config) -> RankGroup | None:
        """The ranks that train with this one; None where it trains alone. Collective: it starts the default group where
        the launcher has started several processes and the program has not.

        Raises:
            ConfigError, UsageError, RankError: as :func:`deepoffload.ranks.group.open_group`.
        """
        if self._is_local:
            _say_what_is_local(config)
            return None
        if self.world_size == 1:
            _refuse_unknown_meeting()
            return None
        with self.telling("reading the configuration"):
            device = device_of(config)
        opened = open_group(CPU, device, group=self._group, mesh=self._mesh, timeout_s=config.ranks.timeout_s)
        if opened is not None:
            opened.values_of_rank_0 = self._values_of_rank_0
        return opened

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """What fails inside, before the ranks have met, fails on all of them: the others are told when they come."""
        try:
            yield
        except Exception as error:
            told = self._tell(error, what) if self.world_size > 1 else None
            if told is None or type(told) is not type(error):
                raise
            told.__dict__.update(error.__dict__)
            raise told from error

    def _tell(self, error: Exception, what: str) -> DeepOffloadError | None:
        """Returns what the others raise; None where all have failed alike, or nobody hears it."""
        log.error("%s failed, which the other ranks are told (within %g s): %s", what, HEARD_WITHIN_S, error)
        said = type(error).__name__, what, told_of(error)
        # Where the ranks compute may not be known yet.
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        with suppress(DeepOffloadError):  # they do not come; what is raised here says what has happened first
            return tell_failure(
                said,
                accelerator or CPU,
                (self._group, self._mesh),
                is_known=self._is_known,
                limit_s=TELL_S,
                heard_within_s=HEARD_WITHIN_S,
            )
        return None


def _check_words(group: Any, mesh: Any, ranks: str | Mapping[str, Any] | None) -> None:
    """Raise ConfigError where ``ranks`` is a word that says nothing, or contradicts the others."""
    if not isinstance(ranks, str):
        return
    if ranks != LOCAL:
        raise ConfigError(
            f'ranks = {ranks!r}: expected "local" for a model that this process has for itself, or the section '
            'ranks of the configuration, such as {"timeout_s": 60}'
        )
    if group is not None or mesh is not None:
        given = "mesh" if group is None else "group"
        raise ConfigError(
            f'ranks="local" and {given}= contradict each other. Leave {given}= out where only this process has the '
            'model, such as the stage of a pipeline. Where others train it, too, leave ranks="local" out and name '
            'them: mesh=mesh["dp"] for a dimension "dp" of data-parallel ranks, or their group='
        )


def _say_what_is_local(config: Config) -> None:
    """Say what stays with this process where there are others: nobody adds gradients up, or their squares."""
    world_size = default_world_size()
    if world_size is None or world_size == 1:
        return
    clips = "" if config.gradient_clipping is None else f", so gradient_clipping={config.gradient_clipping:g} is, too"
    announce(
        f'ranks="local": one of {world_size} processes, which has its model for itself. Nothing adds its gradients up '
        f"with those of others, and the norm that max_grad_norm clips is that of this model alone{clips}"
    )


def _refuse_unknown_meeting() -> None:
    """Raise ConfigError where a launcher has started several processes and does not say where they meet: each would
    train a separate model.

    What schedulers of clusters set is not asked: an interactive shell under Slurm has ``SLURM_NTASKS``, too.
    Where the program has started a default group itself, no launcher is asked.
    """
    name = next((name for name in LAUNCHERS if os.environ.get(name)), None)
    if name is None or default_world_size() is not None or os.environ.get("WORLD_SIZE"):
        return
    said, (number, launcher) = os.environ[name], LAUNCHERS[name]
    if said.isdecimal() and int(said) > 1:
        rank = os.environ.get(number)
        which = "one" if rank is None else f"rank {rank}"
        raise ConfigError(
            f"{name}={said} in the environment: {launcher} has started this process as {which} of {said}, and does not "
            "say where the ranks meet. Start them with torchrun, or call torch.distributed.init_process_group before. "
            f'Where the processes are meant to be independent, say ranks="local", or unset {name}'
        )
