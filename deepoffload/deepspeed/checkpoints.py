"""Checkpoints with DeepSpeed's arguments and results: what ``engine.save_checkpoint`` and its like do."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from deepoffload.checkpoint.arguments import check_switches
from deepoffload.checkpoint.convert.run_source import source_of
from deepoffload.checkpoint.convert.universal import read_universal, universal_folder
from deepoffload.checkpoint.directory import prepare, staging, sync_directory, sync_file
from deepoffload.checkpoint.loading import Wanted
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.checkpoint.several_ranks import Alive, on_rank_0
from deepoffload.checkpoint.tags import checked_directory, checked_tag
from deepoffload.checkpoint.tile_places import frozen_names
from deepoffload.checkpoint.training_state import TrainingState
from deepoffload.checkpoint.values import clipped
from deepoffload.config import Config
from deepoffload.deepspeed.recovery_scripts import write_scripts
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.runtime.loop import TrainingLoop

log = logging.getLogger("deepoffload")

NAME_BYTES_MAX = 255
ROOM_BYTES = 1 << 20
"""Asked for in addition to the weights: names and headers."""


class EngineCheckpoints:
    """Saves and loads what an engine consists of.

    Args:
        schedule: None where there is none.
        config: says whether DeepSpeed's universal checkpoints are loaded, whether a save returns before the checkpoint
            is complete, and what a save does where ranks give different tags. With a stage of ZeRO DeepSpeed's scripts
            are left next to the checkpoints.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        schedule: Any,
        loop: TrainingLoop,
        config: Config,
    ) -> None:
        others = {"loop": loop} if schedule is None else {"loop": loop, "scheduler": schedule}
        self._state = TrainingState(module, optimizer, **others)
        self._loop = loop
        self._module = module
        self._config = config

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: object,
        client_state: Mapping[str, Any] | None,
        *,
        update_latest: bool,
        leave_out_frozen: bool,
    ) -> None:
        """See :meth:`TrainingEngine.save_checkpoint`."""
        check_switches(save_latest=update_latest, exclude_frozen_parameters=leave_out_frozen)
        if client_state is not None and not isinstance(client_state, Mapping):
            raise UsageError(f"client_state has to be a dict, or None, not a {type(client_state).__name__}")
        waiting, gradients = self._loop.micro_steps_waiting, self._loop.core.gradients
        left_out = waiting > 0 and gradients.early is None and gradients.speculation is None  # these update before step
        self._state.save_as(
            directory,
            tag,
            client_state={} if client_state is None else client_state,
            update_latest=update_latest,
            leave_out_frozen=leave_out_frozen,
            leave_out_gradients=left_out,
            step=self._loop.updates,
            other_tags=self._config.tag_validation,
            wait=not self._config.decoupled_saves,
        )
        if self._config.zero_stage:
            target = os.fspath(directory)
            on_rank_0(self._module, f"leaving scripts in {target}", partial(write_scripts, target))
        if left_out:
            log.warning(
                "save_checkpoint in the middle of an update: the gradients of %d of %d micro-steps are not saved; "
                "a run that loads this begins the update again, so save after the step that updates",
                waiting,
                self._loop.accumulation_steps,
            )

    def commit(self) -> None:
        """See :meth:`TrainingEngine.step`."""
        self._state.commit_as(self._loop.updates)

    def resume(self) -> int:
        """See :meth:`TrainingEngine.resume`."""
        return self._state.resume()

    def discard(self) -> None:
        """See :meth:`TrainingEngine.discard`."""
        self._state.discard()

    def load(self, directory: str | os.PathLike[str], tag: object, wanted: Wanted) -> tuple[str | None, Any]:
        """See :meth:`TrainingEngine.load_checkpoint`."""
        if self._config.load_universal:
            with torch.inference_mode(False):  # what it reads is what training continues with
                return self._load_universal_from(checked_directory(directory), tag, wanted)
        found = self._state.load_if_there(directory, tag, wanted)
        if found is None:
            log.warning("load_checkpoint: there is no file 'latest' in %s, so nothing was loaded", os.fspath(directory))
            return None, None
        return found.folder, found.client_state

    def _load_universal_from(self, directory: str, tag: object, wanted: Wanted) -> tuple[str, Any]:
        folder = universal_folder(directory, None if tag is None else checked_tag(tag))
        run = read_universal(folder)
        progress = Progress(run.nbytes, f"loading {folder}", f"loaded {folder}")
        found = self._state.load_source(source_of(run, folder, progress.advance), wanted)
        progress.done()
        return found.folder, found.client_state


def save_weights(module: nn.Module, directory: str | os.PathLike[str], name: str, *, leave_out_frozen: bool) -> str:
    """Write the weights as a ``state_dict`` with ``torch.save``; the file appears when it is complete.

    Raises:
        UsageError: the directory or the name cannot be used. IoFailure: the disk is full or failed.
    """
    check_switches(exclude_frozen_parameters=leave_out_frozen)
    if not isinstance(name, str):
        raise UsageError(f"save_16bit_model: save_filename has to be the name of a file, not {clipped(repr(name))}")
    is_name = name and name.isprintable() and os.path.basename(name) == name and not name.startswith(".")
    if not is_name or len(os.fsencode(name)) > NAME_BYTES_MAX:
        raise UsageError(f"save_16bit_model: {clipped(repr(name))} is no name of a file in {os.fspath(directory)}")
    if name.endswith(".safetensors"):
        raise UnsupportedError(
            "save_16bit_model writes torch's format; deepoffload.save_pretrained(engine, directory) writes safetensors"
        )
    target = checked_directory(directory)
    path = os.path.join(target, name)
    on_rank_0(module, f"save_16bit_model to {path}", partial(_write_weights, module, target, name, leave_out_frozen))
    return path


def _write_weights(module: nn.Module, target: str, name: str, leave_out_frozen: bool, alive: Alive) -> None:
    alive()
    left_out = frozen_names(module) if leave_out_frozen else frozenset()
    weights = {key: value for key, value in module.state_dict().items() if key not in left_out}
    made_first = prepare(target, sum(value.nbytes for value in weights.values()) + ROOM_BYTES, "save_16bit_model")
    path = os.path.join(target, name)
    with staging(target, made_first) as staged:
        made = os.path.join(staged, name)
        try:
            torch.save(weights, made)
            sync_file(made)
            os.replace(made, path)
            sync_directory(target)
        except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError for a full disk
            cause = error if isinstance(error, OSError) else OSError(0, str(error))
            raise failure("writing the weights", cause, path, 0) from error
