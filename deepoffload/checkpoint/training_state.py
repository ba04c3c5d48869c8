"""``TrainingState``: everything that a training run consists of, saved to a directory and loaded from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import nn

from deepoffload.checkpoint.arguments import check_keep_last, check_switches
from deepoffload.checkpoint.background import SaveHandle, finish, start
from deepoffload.checkpoint.cut import held_still
from deepoffload.checkpoint.durable_run import DurableRun
from deepoffload.checkpoint.given_objects import check_objects, check_params
from deepoffload.checkpoint.guards import (
    GradientWatch,
    HalfLoaded,
    OneAtATime,
    refuse_during_calls,
    refuse_in_forward,
)
from deepoffload.checkpoint.loading import Wanted, match
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.random_states import checked_random_states, restore_random_states
from deepoffload.checkpoint.remedies import Remedies
from deepoffload.checkpoint.saving import SHARD_BYTES, Content, Save, choose_weight_plan
from deepoffload.checkpoint.several_ranks import all_ranks, meet, of_rank_0, same_arguments, tag_of_all
from deepoffload.checkpoint.source import TrainingSource, open_checkpoint
from deepoffload.checkpoint.state_files import held_arrays, of_all, plan_state
from deepoffload.checkpoint.tags import checked_directory, checked_tag, folder_to_load, lacking_in
from deepoffload.checkpoint.tile_places import frozen_names, places_of
from deepoffload.checkpoint.weights_loading import listed
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.optimizer_parts import OptimizerParts, pagers_of, take_apart
from deepoffload.params.pager import Pager
from deepoffload.ranks.joint_task import JointTask
from deepoffload.runtime.engine import Engine

log = logging.getLogger("deepoffload")

SCHEDULE = "scheduler"
"""The name of the object that ``load_lr_scheduler_states`` is about."""


class HasState(Protocol):
    """A schedule, a sampler, a loader, a loop, ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class LoadedCheckpoint(NamedTuple):
    """What a load has found.

    Attributes:
        folder: of the checkpoint. step: optimizer steps that it stands after.
    """

    folder: str
    step: int
    client_state: Any


class TrainingState(DurableRun):
    """A model, its optimizer, and other objects that have a state. All is saved and loaded piece by piece, within the
    budget.

    Saved are: weights with their exact fp32 masters, all optimizer state as it is stored, settings of the groups, the
    states of ``others``, and of all random number generators. Gradients are not.

    Attributes:
        client_state: what the last commit before a resume was given.

    Args:
        model: an ``nn.Module``, paged in whole, in part or not at all. For what ``initialize`` returns use
            ``engine.save_checkpoint`` and ``engine.load_checkpoint``.
        optimizer: deepoffload's or torch's, over parameters of the model; None: weights only.
        others: objects with ``state_dict`` and ``load_state_dict``, each under a name of its own
            (``scheduler=...``, ``sampler=...``).

    Raises:
        UsageError: an object without these methods or one that is given twice, parameters of another model, or the
        model has a ``TrainingState`` already.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **others: HasState) -> None:
        if not isinstance(model, nn.Module):
            hint = "use engine.save_checkpoint and engine.load_checkpoint" if hasattr(model, "module") else ""
            hint = hint or "write TrainingState(model, optimizer)"
            raise UsageError(f"TrainingState takes a torch.nn.Module, not {type(model).__name__}; {hint}")
        self._module: nn.Module = getattr(model, "_orig_mod", model)
        self._optimizer = optimizer
        self._others = dict(others)
        check_objects(self._module, self._optimizer, self._others)
        self._watch = GradientWatch(self._module, optimizer)
        self._half_loaded = HalfLoaded(self._module, optimizer)
        self._calls = OneAtATime()
        self._running: SaveHandle | None = None
        self._steps_before = _steps_of(optimizer)
        self._commits = None
        self.client_state = None
        self._own_engines()

    @property
    def step(self) -> int:
        """Optimizer steps so far; those before this object was made as far as the optimizer counts them."""
        return self._steps_before + self._watch.steps

    @overload
    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        keep_last: int | None = None,
        *,
        wait: Literal[True] = True,
    ) -> str: ...

    @overload
    def save(
        self, directory: str | os.PathLike[str], tag: str | None = None, keep_last: int | None = None, *, wait: bool
    ) -> str | SaveHandle: ...

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        keep_last: int | None = None,
        *,
        wait: bool = True,
    ) -> str | SaveHandle:
        """Write everything to the folder ``directory/tag``, which appears when it is complete.

        Changes nothing in the run: its bits are those of a run without a save.

        Args:
            directory: made when it does not exist. Its file ``latest`` names the newest tag.
            tag: ``global_step<n>`` when not said. One of the same tag is replaced when the new one is complete.
            keep_last: how many complete checkpoints to keep, with this one; older ones are removed after it is written.
            wait: False: return at once; what is saved are the bytes of this moment, however the program continues. One
                save at a time: if another is under way, the call first waits for it.

        Returns:
            The folder. ``from_pretrained`` can read it, when the model is one of transformers. Without ``wait`` a
            handle, whose ``wait()`` returns the folder.

        Raises:
            UsageError: gradients wait for a step, or the call comes from inside a forward, or the directory cannot be
            used. UnsupportedError: a state that a checkpoint does not hold; the message names its key.
            IoFailure: no room on the disk, or a transfer failed. Earlier checkpoints are as they were in all of these.
            Also what the save before failed with, if it was one without ``wait`` and its handle has not raised it.
        """
        handle = self.save_as(directory, tag, keep_last=keep_last, other_tags="Fail", wait=wait)
        return handle.folder if wait else handle

    def load(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> LoadedCheckpoint:
        """Take over what was saved, under any budget, tiers and precision. Gradients are dropped.

        Args:
            tag: not said: what ``latest`` names.
            load_module_strict: False: weights that only one side has are left alone.
            load_optimizer_states: False: the optimizer stays as it is; weights still get their exact masters.
            load_lr_scheduler_states: False: the object called ``scheduler`` stays as it is.
            load_module_only: nothing but the weights, with their masters.

        Raises:
            UsageError: there is nothing to load, the checkpoint is damaged or of another model or optimizer. Nothing
            has been changed unless the message says so. UnsupportedError: a newer format. IoFailure: it cannot be
            read. After a failure on the way forwards and steps are refused until a load succeeds.
        """
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        found = self.load_if_there(directory, tag, wanted)
        if found is None:
            target = checked_directory(directory)
            raise UsageError(f"there is nothing to load in {target}: {lacking_in(target)}")
        return found

    # -- saving ----------------------------------------------------------------------------------------------------

    def save_as(
        self,
        directory: str | os.PathLike[str],
        tag: object = None,
        *,
        keep_last: int | None = None,
        client_state: Any = None,
        update_latest: bool = True,
        leave_out_frozen: bool = False,
        leave_out_gradients: bool = False,
        step: int | None = None,
        other_tags: str = "Warn",
        wait: bool = True,
    ) -> SaveHandle:
        """:meth:`save` with the other arguments of ``engine.save_checkpoint``.

        Args:
            other_tags: ``"Warn"``, ``"Fail"`` or ``"Ignore"``, where ranks give different tags.
            leave_out_gradients: gradients may wait for a step; they are not saved.
        """
        with ExitStack() as calls, ExitStack() as undo:
            with all_ranks(self._module, "TrainingState.save") as task:
                check_switches(wait=wait)
                check_keep_last(keep_last)
                step = self.step if step is None else step
                name, target = checked_tag(f"global_step{step}" if tag is None else tag), checked_directory(directory)
                given = {"save_latest": update_latest, "exclude_frozen_parameters": leave_out_frozen}
                same_arguments(task, directory=target, keep_last=keep_last, wait=wait, **given)
                name = tag_of_all(task, name, other_tags)
                calls.enter_context(self._alone("save"))
                calls.enter_context(torch.no_grad())
                self._end_running()
                pagers = self._ready("save")
                if not leave_out_gradients:
                    self._refuse_waiting("save")
                parts, training = self._small_values(pagers, client_state, task)
                with held_still(pagers):
                    content = self._content(pagers, parts, training, step, task, leave_out_frozen=leave_out_frozen)
                    share = min((_share_of(pager) for pager in pagers), default=1.0)
                    save = Save(
                        target, name, content, task, update_latest=update_latest, keep_last=keep_last, share=share
                    )
                    undo.callback(save.abandon)
                    save.freeze(pagers, trains_on=not wait)
            undo.pop_all()
            self._running = finish(save) if wait else start(save)
            return self._running

    def _end_running(self) -> None:
        """One save at a time. Raises what the one before failed with, if nobody was told."""
        running, self._running = self._running, None
        if running is not None:
            running.end_before()
        for pager in pagers_of(list(self._module.parameters())):
            if pager.life.closed_because is None:  # a forked child has not the thread that it would wait for
                pager.tiers.guards.finish()  # of a TrainingState that is given up, while its save is not

    def _small_values(
        self, pagers: list[Pager], client_state: Any, task: JointTask | None
    ) -> tuple[OptimizerParts | None, dict[str, Any]]:
        """The optimizer's parts, and everything that is no weight and no array of it. When this returns no rank's
        program changes anything any more, or needs bytes of another."""
        parts = None if self._optimizer is None else take_apart(self._optimizer)
        names = {key: place.name for key, place in places_of(self._module).items()}
        training = self._values(parts, names, pagers, client_state)
        if task is not None:
            _, *training["random_of_other_ranks"] = task.gather(training["random"])
        return parts, training

    def _content(
        self,
        pagers: list[Pager],
        parts: OptimizerParts | None,
        training: dict[str, Any],
        step: int,
        task: JointTask | None,
        *,
        leave_out_frozen: bool,
    ) -> Content:
        names = {id(param): name for name, param in self._module.named_parameters()}
        places = places_of(self._module)
        left_out = frozen_names(self._module) if leave_out_frozen else frozenset()
        weights, opener, hub_names = choose_weight_plan(self._module, left_out)
        held = held_arrays(names, pagers, parts)
        held = held if task is None else of_all(task.gather(held))
        state = plan_state(names, places, pagers, parts, SHARD_BYTES, held)
        training["weights"] = {"hub_names": hub_names, "left_out": sorted(left_out)}
        return Content(self._module, weights, opener, hub_names, state, training, step)

    # -- loading ---------------------------------------------------------------------------------------------------

    def load_if_there(self, directory: str | os.PathLike[str], tag: object, wanted: Wanted) -> LoadedCheckpoint | None:
        """:meth:`load`, or None where no tag is said and there is no ``latest``."""
        with all_ranks(self._module, "TrainingState.load") as task, self._alone("load"):
            target = checked_directory(directory)
            same_arguments(task, directory=target, tag=None if tag is None else str(tag), **wanted.switches)
            self._end_running()
            pagers = self._ready("load", also_half_loaded=True)
            folder = of_rank_0(task, folder_to_load(target, tag))
            if folder is None:
                return None
            progress = Progress(_size_of(folder), f"loading {folder}", f"loaded {folder}")
            with open_checkpoint(folder, progress.advance) as source:
                found = self._take_over(source, pagers, wanted, task)
            progress.done()
            return found

    def load_source(self, source: TrainingSource, wanted: Wanted) -> LoadedCheckpoint:
        """:meth:`load` of what is open already: a checkpoint of another library."""
        with all_ranks(self._module, "TrainingState.load") as task, self._alone("load"):
            same_arguments(task, folder=source.folder, **wanted.switches)
            self._end_running()
            return self._take_over(source, self._ready("load", also_half_loaded=True), wanted, task)

    def _take_over(
        self, source: TrainingSource, pagers: list[Pager], wanted: Wanted, task: JointTask | None = None
    ) -> LoadedCheckpoint:
        """Check everything, on all ranks, then put it in."""
        skip = {SCHEDULE} if not wanted.schedule else set()
        others = {} if wanted.weights_only else self._matched_others(source, skip, wanted.remedies)
        loading = match(source, self._module, self._optimizer, wanted)
        random = (
            None if wanted.weights_only else _random_states(source, 0 if task is None or source.is_own else task.rank)
        )
        for pager in pagers:
            pager.catch_up_all()
        meet(task)
        with self._half_loaded.during(source.folder):
            self._drop_gradients()
            loading.apply(pagers, task)
            for other, saved in others.items():
                _load_other(other, self._others[other], saved, source)
            if random is not None:
                restore_random_states(random, self._devices(pagers))
        if wanted.with_optimizer:
            self._steps_before, self._watch.steps = source.step, 0
        return LoadedCheckpoint(source.folder, source.step, source.training.get("client_state"))

    def _matched_others(self, source: TrainingSource, skip: set[str], remedies: Remedies) -> dict[str, Any]:
        saved = source.training.get("others")
        if not isinstance(saved, dict):
            raise UsageError(f"{source.folder} is damaged: it has no states of other objects")
        missing = sorted(self._others.keys() - saved.keys() - skip)
        unknown = sorted(saved.keys() - self._others.keys() - skip)
        if source.converted_from is not None:  # another library has other objects
            for name in (*missing, *unknown):
                log.warning("%s: the state of %r stays as it is: only one side has it", source.folder, name)
        elif missing or unknown:
            only_schedule = {*missing, *unknown} == {SCHEDULE}
            raise UsageError(
                f"the checkpoint has other objects than this TrainingState: {listed('it lacks', missing)}"
                f"{listed('it also has', unknown)}"
                f"{remedies.without_schedule if only_schedule else remedies.weights_only}"
            )
        return {name: saved[name] for name in self._others if name in saved and name not in skip}

    def _drop_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        self._module.zero_grad(set_to_none=True)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _own_engines(self) -> None:
        """One of these for each model: two would not know of each other's half loads. One for each engine whose steps
        are durable: its disk has the record of one run."""
        owners = [pager.engine for pager in pagers_of(list(self._module.parameters()))]
        engines = [owner for owner in owners if isinstance(owner, Engine)]
        mine = {id(param) for param in self._module.parameters()}
        for engine in engines:
            for other in list(engine.training_states):
                if not mine.isdisjoint(map(id, other._module.parameters())):
                    raise UsageError(
                        "this model has a TrainingState already (initialize()'s engine makes one when it saves or "
                        "loads); use that one, or give it up first (del state)"
                    )
                if engine.durability is not None:
                    raise UsageError(
                        "durability with two models in one offload_context (or zero.Init), each with a TrainingState: "
                        "the durable step is that of one of them; build each model in a context of its own"
                    )
        for engine in engines:
            engine.training_states.add(self)

    def _ready(self, what: str, *, also_half_loaded: bool = False) -> list[Pager]:
        if not also_half_loaded:
            self._half_loaded.refuse()
        check_params(self._module, self._optimizer)
        pagers = pagers_of(list(self._module.parameters()))
        refuse_during_calls(self._module, what, of_all_threads=also_half_loaded)
        refuse_in_forward(pagers, what)
        return pagers

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time; what it makes are ordinary tensors, with which training continues."""
        with self._calls.during(what), torch.inference_mode(False):
            yield

    @staticmethod
    def _devices(pagers: list[Pager]) -> list[torch.device]:
        found = {str(pager.memory.device): pager.memory.device for pager in pagers}
        return [device for device in found.values() if device.type != "cpu"]


def _load_other(name: str, other: HasState, saved: Any, source: TrainingSource) -> None:
    try:
        other.load_state_dict(saved)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if source.converted_from is None:
            raise
        raise UsageError(
            f"{name} ({type(other).__name__}) cannot take over what {source.converted_from} had under that name "
            f"({error!r}): load again with load_lr_scheduler_states=False, or without it"
        ) from error


def _random_states(source: TrainingSource, rank: int) -> dict[str, Any] | None:
    """Those of this rank in the checkpoint; None where it has none, because it was converted from a format without
    them, or because fewer ranks have saved it."""
    states = source.training.get("random")
    if rank:
        others = source.training.get("random_of_other_ranks", [])
        if not isinstance(others, list):
            raise UsageError(f"{source.folder} is damaged: it has no list of the random states of other ranks")
        if rank > len(others):
            log.info("%s has no random states of rank %d, which keeps its own: fewer ranks saved", source.folder, rank)
            return None
        states = others[rank - 1]
    return None if states is None and source.converted_from is not None else checked_random_states(states)


def _share_of(pager: Pager) -> float:
    """Of the disk, for a save that goes on while the program trains."""
    engine = pager.engine
    return engine.config.checkpoint.share if isinstance(engine, Engine) else 1.0


def _steps_of(optimizer: torch.optim.Optimizer | None) -> int:
    """As many steps as the parameter with the most of them has made."""
    states = optimizer.state.values() if optimizer is not None else ()
    steps = [state["step"] for state in states if isinstance(state, dict) and "step" in state]
    try:
        return max((int(step) for step in steps), default=0)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"the optimizer's step counts are no numbers: {error}") from error


def _size_of(folder: str) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror})") from error
