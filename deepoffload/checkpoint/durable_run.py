"""The part of a training state that makes its steps durable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from deepoffload.checkpoint.arguments import check_switches
from deepoffload.checkpoint.commits import Commits
from deepoffload.checkpoint.durable_ranks import check_same_cut
from deepoffload.checkpoint.guards import GradientWatch
from deepoffload.checkpoint.loading import Wanted
from deepoffload.checkpoint.random_states import random_states
from deepoffload.checkpoint.remedies import OF_RESUME
from deepoffload.checkpoint.several_ranks import all_ranks
from deepoffload.checkpoint.state_files import is_array
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.optimizer_parts import OptimizerParts, take_apart
from deepoffload.params.pager import Pager


class DurableRun:
    """What :class:`~deepoffload.checkpoint.training_state.TrainingState` has of durable steps; that fills the rest."""

    _module: nn.Module
    _optimizer: torch.optim.Optimizer | None
    _others: dict[str, Any]
    _watch: GradientWatch
    _commits: Commits | None
    client_state: Any
    step: Any
    _alone: Callable[[str], AbstractContextManager[None]]
    _ready: Callable[..., list[Pager]]
    _end_running: Callable[[], None]
    _take_over: Callable[..., Any]
    _devices: Callable[[list[Pager]], list[torch.device]]

    # -- durable steps ---------------------------------------------------------------------------------------------

    def commit(self, wait: bool = False, client_state: Any = None) -> None:
        """End a step, with the key ``durability``: it survives a death of the process, and a power failure.

        When commit number n has returned, a later death resumes from step n - ``every`` or a newer one, with the bits
        of a run that never died. It writes while training continues.

        Args:
            wait: return when step n itself is on the disk.
            client_state: what :attr:`client_state` is after a resume; values as in a checkpoint.

        Raises:
            UsageError: there is no durable state, no step since the last commit, gradients wait for a step, or the
            state of an earlier run would be replaced. UnsupportedError: a value that a record does not hold.
            IoFailure, BudgetError: the disk failed or is full. The run, and the step that was durable, are as they
            were.
        """
        self.commit_as(self.step, wait=wait, client_state=client_state)

    def resume(self) -> int:
        """Take over the last durable step that an earlier run has left; the number of that step, 0 where there is none.

        Raises:
            UsageError: it is of another model or optimizer, which the message names, or damaged. Nothing has been
            changed unless the message says so. IoFailure: it cannot be read.
        """
        with all_ranks(self._module, "TrainingState.resume") as task, self._alone("resume"):
            self._end_running()
            pagers = self._ready("resume", also_half_loaded=True)
            commits = self._own_commits(pagers, "resume")
            with commits.opened(task) as source:
                if source is None:
                    return 0
                check_same_cut(self._module, source)
                found = self._take_over(source, pagers, Wanted(remedies=OF_RESUME), task)
            self.client_state = found.client_state
            commits.resumed(found.step)
            return found.step

    def discard(self) -> None:
        """Give up the durable state, of this run and of an earlier one. The next commit makes the run durable again.

        Raises:
            UsageError: there is none. IoFailure: the disk failed, and it may still be there.
        """
        with all_ranks(self._module, "TrainingState.discard"), self._alone("discard"):
            self._own_commits(self._ready("discard", also_half_loaded=True), "discard").discard()

    def commit_as(self, step: int, *, wait: bool = False, client_state: Any = None) -> None:
        """:meth:`commit` of a run that counts its steps itself."""
        before = None if self._commits is None else self._commits.committed
        try:
            self._commit_together(step, wait, client_state)
        except BaseException as error:
            if self._commits is not None:
                self._commits.undo(step, before, error)
            raise

    def _commit_together(self, step: int, wait: bool, client_state: Any) -> None:
        together = all_ranks(self._module, "TrainingState.commit")
        with together as task, self._alone("commit"), torch.no_grad():
            check_switches(wait=wait)
            pagers = self._ready("commit")
            commits = self._own_commits(pagers, "commit")
            self._refuse_waiting("commit")

            def take() -> tuple[OptimizerParts | None, dict[str, Any]]:
                parts = None if self._optimizer is None else take_apart(self._optimizer)
                names = {id(param): name for name, param in self._module.named_parameters()}
                return parts, self._values(parts, names, pagers, client_state)

            has_client_state, tell = client_state is not None, None if task is None else task.gather
            commits.commit(step, self._module, take, wait=wait, has_client_state=has_client_state, tell=tell)

    def _own_commits(self, pagers: list[Pager], what: str) -> Commits:
        if self._commits is None:
            self._commits = Commits(pagers, self._optimizer, what)
        return self._commits

    def _refuse_waiting(self, what: str) -> None:
        waiting = self._watch.waiting()
        if waiting is not None:
            raise UsageError(
                f"{what} between backward and step: the gradient of {waiting} waits for a step, and gradients are "
                f"not saved; {what} after optimizer.step(), or call optimizer.zero_grad() first"
            )

    def _values(
        self, parts: OptimizerParts | None, names: Mapping[int, str], pagers: list[Pager], client_state: Any
    ) -> dict[str, Any]:
        """Everything that is no weight and no array of optimizer state."""
        return {
            "weights": {"hub_names": False, "left_out": [], "apart": True},
            "optimizer": None if parts is None else _described(parts, names),
            "others": {name: other.state_dict() for name, other in self._others.items()},
            "random": random_states(self._devices(pagers)),
            "client_state": client_state,
        }


def _described(parts: OptimizerParts, names: Mapping[int, str]) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    for param, state in parts.in_memory.items():
        small = {key: value for key, value in state.items() if not is_array(value)}
        if not small:
            continue
        known = states.setdefault(names[id(param)], small)
        if known is not small and not _equal(known, small):
            raise UnsupportedError(
                f"the tiles of {names[id(param)]} have made different steps: save after a step that all of them make"
            )
    groups = [list(dict.fromkeys(names[id(param)] for param in group)) for group in parts.params]
    counted = Counter(name for group in groups for name in group)
    twice = next((name for name, count in counted.items() if count > 1), None)
    if twice is not None:
        raise UnsupportedError(f"the tiles of {twice} are in different groups of the optimizer: put them into one")
    return {"kind": parts.kind, "groups": parts.groups, "params": groups, "states": states}


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(other[key] == value) for key, value in one.items())
