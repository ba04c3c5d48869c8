"""The durable steps of one training state: when a commit is right, what it takes, and what a new process finds."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepoffload.checkpoint.durable_content import DurableContent
from deepoffload.checkpoint.durable_ranks import newest_of_all
from deepoffload.checkpoint.durable_source import DurableSource, open_durable
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.optimizer_parts import OptimizerParts
from deepoffload.params.pager import Pager
from deepoffload.ranks.joint_task import JointTask
from deepoffload.runtime.durability import Durability, Tell
from deepoffload.runtime.engine import Engine

log = logging.getLogger("deepoffload")


class Commits:
    """Commits of one training state to the durable files of its engine.

    Args:
        what: the call that wants it, for errors.

    Raises:
        UsageError: the engine has no durable state. UnsupportedError: the model has several engines.
    """

    def __init__(self, pagers: Sequence[Pager], optimizer: torch.optim.Optimizer | None, what: str) -> None:
        engines: list[Engine] = []
        for pager in pagers:
            if isinstance(pager.engine, Engine):
                engines.append(pager.engine)
        if len(engines) > 1:
            raise UnsupportedError(f"{what}: the model's parameters have several engines; build it in one context")
        durability: Durability | None = next((engine.durability for engine in engines), None)
        if durability is None:
            raise UsageError(
                f"{what}: this model has no durable state; build it with durability=True and an nvme_path, or use "
                "state.save and state.load"
            )
        self._durability = durability
        self._committed: int | None = None
        self._may_replace = durability.store.found is None
        if optimizer is not None and not isinstance(optimizer, HostOptimizer):  # ours tell the pager themselves
            finish = weakref.WeakMethod(durability.before_other_step)
            hook = optimizer.register_step_pre_hook(lambda *_: _call(finish))
            weakref.finalize(self, hook.remove).atexit = False

    def commit(
        self,
        step: int,
        module: nn.Module,
        take: Callable[[], tuple[OptimizerParts | None, Mapping[str, Any]]],
        *,
        wait: bool,
        has_client_state: bool,
        tell: Tell | None = None,
    ) -> None:
        """See :meth:`TrainingState.commit`.

        Args:
            take: gives what lies in no block, when it is wanted.
            tell: with several ranks, which all commit the same.
        """
        durability = self._durability
        if tell is not None:
            self._agree(step, wait, tell)
        if not self._may_replace:
            raise UsageError(
                f"commit: {', '.join(durability.space.paths)} has the durable state of an earlier run (step "
                f"{durability.store.step}), which this would replace; call resume() first, or discard()"
            )
        if step < 1 or step == self._committed:
            if has_client_state and step == self._committed:
                raise UsageError(
                    f"commit: step {step} is committed already, and what it keeps of client_state stays as it is; give "
                    "client_state to the commit that follows optimizer.step()"
                )
            if wait and self._committed is not None:
                durability.finish(tell)
            if not wait or self._committed is None:
                raise UsageError(
                    f"commit without a step: call optimizer.step() first (step {step} is "
                    f"{'committed already' if self._committed is not None else 'where this run began'})"
                )
            if durability.store.step == step:
                return
        if durability.is_due(step, wait=wait, tell=tell):
            durability.commit(step, DurableContent(durability.space, module, *take()), wait=wait, tell=tell)
        self._committed = step

    def _agree(self, step: int, wait: bool, tell: Tell) -> None:
        """All ranks commit the same step. Where one of them has to wait for it, all do."""
        said = tell((step, wait, self._durability.owed))
        if len({each[:2] for each in said}) > 1:
            differs = ", ".join(f"rank {rank} step {at} (wait={waits})" for rank, (at, waits, _) in enumerate(said))
            raise UsageError(f"commit: all ranks commit the same step in the same way, and here it is {differs}")
        self._durability.owed = next((owed for *_, owed in said if owed is not None), None)

    @property
    def committed(self) -> int | None:
        """The last step of which a commit has returned; None where there is none."""
        return self._committed

    def undo(self, step: int, before: int | None, why: BaseException) -> None:
        """A commit of this step has failed, perhaps on another rank alone.

        Args:
            before: the step that was committed when it began.
        """
        if step != before:
            self._committed = before
            self._durability.undo(step, str(why))

    @contextmanager
    def opened(self, task: JointTask | None) -> Iterator[DurableSource | None]:
        """The step that an earlier run has left; with several ranks the newest one that all of them have. None where
        there is none.

        Raises:
            UsageError: this run has replaced it, or it is of another number of ranks.
        """
        store = self._durability.store
        found = store.found
        own = store.step if self._committed is None else self._committed
        if found is None and own is not None:
            raise UsageError(
                f"resume: this run itself has committed step {own}, which only a new process can resume from; call "
                "resume before the first step"
            )
        step = newest_of_all(self._durability.space, store.left, task, is_first=store.is_first)
        if step is None and store.left:
            log.warning("resume: step %d, the first durable one, is not on all ranks: it is given up", max(store.left))
            self.discard()
        if step is None:
            yield None
            return
        with open_durable(self._durability.space, store.left[step]) as source:
            yield source

    def resumed(self, step: int) -> None:
        """The run stands after this step now: what there is may be replaced by newer ones."""
        self._durability.store.choose(step)
        self._committed, self._may_replace = step, True

    def discard(self) -> None:
        """See :meth:`TrainingState.discard`."""
        self._durability.discard()
        self._committed, self._may_replace = None, True


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    if method is not None:
        method()
