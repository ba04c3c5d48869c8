"""``save_pretrained``: a paged model as safetensors files in the Hugging Face layout, streamed inside the budget."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from torch import nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.directory import prepare, publish, staging, sync_file
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.ranks_saving import RankWriter, shared_directory
from deepoffload.checkpoint.safetensors_file import failure, write_file
from deepoffload.checkpoint.several_ranks import Alive, all_ranks, link_of, on_rank_0, same_arguments
from deepoffload.checkpoint.shards import INDEX_NAME, shard_bytes, split
from deepoffload.checkpoint.tags import checked_directory
from deepoffload.checkpoint.weights import HasModule, WeightOpener, plan_weights, unwrapped
from deepoffload.config.units import format_bytes
from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.ranks.joint_task import JointTask

CONFIG_FILES_BYTES = 1 << 20
"""Room asked for in addition to the weights, for configuration files and the index."""


def save_pretrained(
    model: nn.Module | HasModule,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    *,
    rank0_only: bool = False,
) -> None:
    """Write the weights (and, for models of transformers, the configuration) to ``directory``.

    Parameters are fetched one unit at a time and written from where they lie, so that memory stays within the budget
    plus a few MiB. Names and packing are those of the checkpoint format, so ``from_pretrained`` and every other reader
    of safetensors can load the files. Weights have the dtype they compute in. Tied weights are stored once. The files
    appear when all of them are complete; a save that fails or is killed leaves an earlier one as it was.

    With several ranks call it on all of them. Each writes its own part of every weight into the same files, where all
    see the directory of rank 0; else rank 0 writes. All return when the files are there, and raise what one raises.

    Args:
        model: any module, paged in part, in whole or not at all; also what ``initialize`` returns.
        directory: made when it does not exist.
        max_shard_size: bytes, or text such as ``"5GB"``; larger models are split, with an index.
        safe_serialization: only True: pickled files would need all weights in memory.
        rank0_only: rank 0 writes everything. It waits for nobody then, so it may also call this alone.

    Raises:
        UsageError: the directory or an argument cannot be used. UnsupportedError: what the format cannot hold,
        quantized models, adapters. IoFailure: the disk is full or failed. ClosedError: the model's engine is closed.
        RankError: a rank has gone, or does not call this; an ``IoFailure`` of another rank.
    """
    if not safe_serialization:
        raise UnsupportedError(
            "safe_serialization=False would pickle the whole model from memory; leave it out: safetensors files are "
            "written in pieces, and torch and transformers read them"
        )
    module = unwrapped(model, "save_pretrained")
    size = shard_bytes(max_shard_size)
    link = link_of(module)
    if link is None or rank0_only:
        on_rank_0(module, f"save_pretrained to {directory}", partial(_write, module, directory, size))
    else:
        with ExitStack() as stack, all_ranks(module, "save_pretrained") as task:
            assert task is not None, "there is a link"
            _write_together(task, stack, module, directory, size)


class _Save:
    """What is saved, and where. Nothing has been changed when it is made."""

    def __init__(self, module: nn.Module, directory: str | os.PathLike[str], size_bytes: int) -> None:
        self.target = checked_directory(directory)
        self._module = module
        self._hub_names = transformers_format.is_pretrained_model(module)
        transformers_format.refuse_what_is_not_plain(module)
        self.opener = WeightOpener(to_write=False)
        self.plan = plan_weights(module, hub_names=self._hub_names, opener_of=self.opener.opener_of)
        self.layout = split(self.plan.entries, size_bytes, self.plan.num_parameters)
        self.plan.check_headers(self.layout)
        count = f"{len(self.layout.files)} file{'' if len(self.layout.files) == 1 else 's'}"
        saved = f"saved {format_bytes(self.layout.total_bytes)} in {count} to {self.target}"
        self.progress = Progress(self.layout.total_bytes, f"saving to {self.target}", saved)

    def staging(self) -> AbstractContextManager[str]:
        """The directory in which the files are made, once there is room for them."""
        return staging(self.target, prepare(self.target, self.layout.total_bytes + CONFIG_FILES_BYTES))

    def write_small_files(self, staged: str) -> None:
        """All that are not weights."""
        try:
            if self._hub_names:
                transformers_format.write_config_files(self._module, staged)
            for name in os.listdir(staged):
                sync_file(os.path.join(staged, name))
        except OSError as error:
            raise failure("writing", error, error.filename or staged, 0) from error
        if self.layout.index is not None:
            write_small_file(os.path.join(staged, INDEX_NAME), self.layout.index.encode())

    def write_weights(self, staged: str, alive: Alive) -> None:
        """All files of weights, by this rank."""

        def advance(nbytes: int) -> None:
            self.progress.advance(nbytes)
            alive()

        with outside_user_modes():
            for name, entries in self.layout.files.items():
                file = os.path.join(staged, name)
                SHIELD.let_through(write_file, (file, entries, self.plan.metadata, advance))

    def finish(self, staged: str) -> None:
        """The files get their names."""
        publish(staged, self.target)
        self.progress.done()


def _write(module: nn.Module, directory: str | os.PathLike[str], size_bytes: int, alive: Alive) -> None:
    save = _Save(module, directory, size_bytes)
    with save.staging() as staged:
        save.write_small_files(staged)
        save.write_weights(staged, alive)
        save.finish(staged)


def _write_together(
    task: JointTask, stack: ExitStack, module: nn.Module, directory: str | os.PathLike[str], size_bytes: int
) -> None:
    save = _Save(module, directory, size_bytes)
    same_arguments(task, directory=save.target, max_shard_size=size_bytes)
    staged = stack.enter_context(save.staging()) if task.rank == 0 else None
    shared = shared_directory(task, staged)
    if staged is not None:
        save.write_small_files(staged)
        if shared is None:
            save.write_weights(staged, task.alive)

    def advance(nbytes: int) -> None:
        save.progress.advance(nbytes)
        task.alive()

    if shared is not None:
        writer = RankWriter(task, save.plan, save.opener, advance)
        with outside_user_modes():
            for name, entries in save.layout.files.items():
                SHIELD.let_through(writer.write, (os.path.join(shared, name), entries, save.plan.metadata))
    if staged is not None:
        save.finish(staged)
