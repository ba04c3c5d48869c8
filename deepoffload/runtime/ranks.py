"""Which ranks train a model together: what the program says, and what it leaves to its launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepoffload.config import Config
from deepoffload.errors import ConfigError, DeepOffloadError
from deepoffload.ranks.group import RankGroup, default_group, default_world_size, open_group, world_size_of
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.announce import announce
from deepoffload.runtime.device import CPU, device_of

log = logging.getLogger("deepoffload")

LOCAL = "local"

TELL_S = 30.0
"""How long a rank that fails before it meets the others waits for them, to tell them."""

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
        ConfigError: they contradict each other, or the environment. The other ranks are told.
        UsageError: this rank is not in the group or mesh. Those that are need not hear of it.
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
        try:
            _check_words(group, mesh, ranks)
            self.world_size = 1 if self._is_local else world_size_of(group, mesh)
        except ConfigError:
            self._take_who_can_hear()
            with self.telling("reading group=, mesh= and ranks="):
                raise

    def _take_who_can_hear(self) -> None:
        """Whom this rank tells: those that it names, where that names any, else those of the default group."""
        try:
            self.world_size = world_size_of(self._group, self._mesh)
        except DeepOffloadError:
            self._group, self._mesh = default_group(), None
            try:
                self.world_size = world_size_of(self._group)
            except DeepOffloadError:
                self.world_size = 1  # the environment does not say where others are

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
            if self.world_size > 1:
                log.error("%s failed, which the other ranks are told (within %g s): %s", what, TELL_S, error)
                self._tell(error, what)
            raise

    def _tell(self, error: Exception, what: str) -> None:
        # Where the ranks compute may not be known yet. A group that knows no CPU, as NCCL's, will do.
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        try:
            group = open_group(CPU, accelerator, group=self._group, mesh=self._mesh, timeout_s=TELL_S)
        except DeepOffloadError:
            return  # they do not come; what is raised here says what has happened first
        Agreement(group).tell(error, what)
        if group is not None:
            group.close()


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
