"""Writes a checkpoint: plan all files, check that there is room, freeze what goes into them, copy, write the manifest,
publish.

Only the copying takes long. It is the same whether the program waits for it or trains on (``checkpoint.background``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.block_pool import BLOCK_BYTES
from deepoffload.checkpoint.block_writer import FilePart, write_small_file
from deepoffload.checkpoint.copying import Copying
from deepoffload.checkpoint.cut import CutContent, add_weights
from deepoffload.checkpoint.directory import prepare, staging, sync_file
from deepoffload.checkpoint.file_layout import TRAINING_NAME, TRAINING_TENSORS_NAME, PlannedFile, PlannedTensor
from deepoffload.checkpoint.file_set import FileSet
from deepoffload.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, TensorRecord, manifest_text
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.checkpoint.several_ranks import refuse_other_plans, shared_folder
from deepoffload.checkpoint.shards import INDEX_NAME, split
from deepoffload.checkpoint.state_files import StatePlan
from deepoffload.checkpoint.tags import check_place, prune, publish_tag
from deepoffload.checkpoint.values import encode
from deepoffload.checkpoint.weights import WeightOpener, WeightPlan, plan_weights
from deepoffload.config.units import format_bytes
from deepoffload.errors import UnsupportedError
from deepoffload.io.checksums import crc32c_of
from deepoffload.io.engine import IoEngine
from deepoffload.memory.lock import SHIELD
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.ranks.joint_task import JointTask

SHARD_BYTES = 5_000_000_000
SMALL_FILES_BYTES = 1 << 20
"""Room asked for in addition to what is counted: for configuration files and the index."""


@dataclass(frozen=True)
class Content:
    """What one checkpoint consists of.

    Attributes:
        training: everything that is no weight and no array of optimizer state; values that a checkpoint holds.
    """

    module: nn.Module
    weights: WeightPlan
    opener: WeightOpener
    hub_names: bool
    state: StatePlan
    training: Mapping[str, Any]
    step: int


def choose_weight_plan(module: nn.Module, left_out: frozenset[str]) -> tuple[WeightPlan, WeightOpener, bool]:
    """The plan of the weights, what its sources are, and whether they are named and packed as on the hub: where the
    module is a model of transformers whose packing can be undone when it is loaded, and which has no formats of its own
    (adapters)."""
    opener = WeightOpener(to_write=False)
    if transformers_format.is_pretrained_model(module):
        try:
            transformers_format.refuse_what_is_not_plain(module)
            plan = plan_weights(module, hub_names=True, left_out=left_out, opener_of=opener.opener_of)
            for tensor in plan.tensors.values():
                for _ in plan.expressions.parts(tensor):
                    pass
            return plan, opener, True
        except UnsupportedError:
            opener = WeightOpener(to_write=False)
    plan = plan_weights(module, hub_names=False, left_out=left_out, opener_of=opener.opener_of)
    return plan, opener, False


class Save:
    """One checkpoint on its way. What it consists of is planned when this is made, frozen by :meth:`freeze`, and copied
    by :meth:`run`; the first two inside one :func:`~deepoffload.checkpoint.cut.held_still`.

    Several ranks write the same files: each what it owns, and rank 0 what nobody else has. Rank 0 makes the folder and
    publishes it.

    Args:
        task: what all ranks do together; None with one.
        keep_last: how many complete checkpoints stay in ``directory``; None: all.
        share: of the disk while the program itself has transfers.

    Raises:
        UsageError: the directory cannot be used. UnsupportedError: a value that a checkpoint does not hold.
        IoFailure: there is no room. Nothing is left of it in all of these.
    """

    def __init__(
        self,
        directory: str,
        tag: str,
        content: Content,
        task: JointTask | None,
        *,
        update_latest: bool,
        keep_last: int | None,
        share: float,
    ) -> None:
        self.folder = os.path.join(directory, tag)
        self.step = content.step
        self._directory = directory
        self._tag = tag
        self._content = content
        self._update_latest = update_latest
        self._keep_last = keep_last
        self._task = task
        self._is_first = is_first = task is None or task.rank == 0
        if is_first:
            check_place(directory, tag)
        layout = split(content.weights.entries, SHARD_BYTES, content.weights.num_parameters)
        self._index = layout.index
        weight_files = [
            PlannedFile(name, [PlannedTensor(e.name, e.dtype, e.shape) for e in entries], content.weights.metadata)
            for name, entries in layout.files.items()
        ]
        self._planned = [*weight_files, *content.state.files]
        if task is not None:
            refuse_other_plans(task, self._planned)
        self._cut = CutContent()
        add_weights(self._cut, content.weights, content.opener.targets, weight_files, with_ordinary=is_first)
        content.state.add_to(self._cut, with_ordinary=is_first)
        self._training = self._plan_training() if is_first else b""
        total_bytes = sum(file.nbytes for file in self._planned) + len(self._training)
        done = f"saved {format_bytes(total_bytes)} to {self.folder}"
        self._progress = Progress(total_bytes, f"saving to {self.folder}", done) if is_first else None
        with contextlib.ExitStack() as stack:
            if is_first:
                made = prepare(directory, total_bytes + SMALL_FILES_BYTES, "saving a checkpoint")
                self._staged = os.path.join(stack.enter_context(staging(directory, made)), "new")
                self._make_folder()
                self._files = self._open_files()
                if task is not None:
                    stack.callback(self._files.close)
                    task.gather(self._staged)
            elif task is not None:
                self._staged = shared_folder(task)
                self._files = self._open_files()
            self.copying = Copying(self._files, share, _nothing if task is None else task.alive)
            self._stack = stack.pop_all()

    def _open_files(self) -> FileSet:
        progress = None if self._progress is None else self._progress.advance
        rank = None if self._task is None else self._task.rank
        return FileSet(self._staged, self._planned, progress or _nothing_of, IoEngine, rank, self._check)

    def _check(self) -> None:
        """Before each write: raise what ends the save."""
        self.copying.check()

    def _plan_training(self) -> bytes:
        """The content of ``training.json``; the tensors that it names get a file."""
        tensors: dict[str, Tensor] = {}
        training = encode(dict(self._content.training), "training", tensors)
        if tensors:
            planned = [PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
            file = PlannedFile(TRAINING_TENSORS_NAME, planned, {"format": "pt"})
            self._planned.append(file)
            for name, (_, begin) in file.places().items():
                self._cut.add_tensor(file.name, begin, tensors[name])
        return json.dumps(training, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"

    def freeze(self, pagers: Sequence[Pager], *, trains_on: bool) -> None:
        """From here on the program may change what it wants. ``trains_on``: before :meth:`run` has returned."""
        if trains_on:
            with outside_user_modes():
                self._cut.copy_memory()
        self.copying.freeze(self._cut, pagers)
        if self._task is not None:
            self._task.goes_on = True

    def run(self) -> str:
        """Write everything and publish it; returns its folder. On no rank before it is there.

        Raises:
            IoFailure: a transfer failed. Nothing is left of it, and earlier checkpoints are as they were.
        """
        task = self._task
        try:
            with contextlib.nullcontext() if task is None else task.together():
                with torch.no_grad(), outside_user_modes():
                    SHIELD.let_through(self.copying.run, kwargs={"with_headers": self._is_first})
                parts = self._files.end_part() if not self._is_first else {}
                everybody = [parts] if task is None else task.gather(parts)
                if self._is_first:
                    self._publish(everybody)
        finally:
            self.abandon()
        return self.folder

    def give_up(self, error: Exception) -> None:
        """End it with an error soon, on all ranks, unless it is about to be published. In any thread."""
        if self._task is not None:
            self._task.give_up(error)
        self.copying.failed(error)

    @property
    def ranks_have_failed(self) -> bool:
        """Whether all calls that need other ranks raise an error."""
        return self._task is not None and self._task.ranks_have_failed

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Around :meth:`run` where the program trains on."""
        with contextlib.ExitStack() as around:
            around.enter_context(self.copying.borrowing_locks())
            if self._task is not None:
                around.enter_context(self._task.outlives_program())
            yield

    def _publish(self, everybody: Sequence[Mapping[str, FilePart]]) -> None:
        """Put together what all ranks have written, and give it its name."""
        for rank, parts in enumerate(everybody):
            self._files.adopt(rank, parts)
        sums = self._files.finish()
        small = self._write_small_files()
        records: dict[str, Mapping[str, TensorRecord]] = {file.name: file.records() for file in self._planned}
        manifest = Manifest(self.step, time.time_ns(), written_by(), {**sums, **small}, records)
        write_small_file(os.path.join(self._staged, MANIFEST_NAME), manifest_text(manifest))
        self.copying.raise_failure()
        if self._task is not None:
            self._task.settle()
        publish_tag(self._staged, self._directory, self._tag, update_latest=self._update_latest)
        if self._progress is not None:
            self._progress.done()
        if self._keep_last is not None:
            prune(self._directory, self._keep_last, self._tag)

    def abandon(self) -> None:
        """Give everything back, and remove what was written and not published. Idempotent."""
        if self._task is not None:
            self._task.end()
        try:
            self.copying.end()
        finally:
            self._stack.__exit__(*sys.exc_info())  # in the handling of an error, folders that were made go, too

    def _make_folder(self) -> None:
        """With the configuration files in it, which the program may change later."""
        try:
            os.mkdir(self._staged)
            if self._content.hub_names:
                transformers_format.write_config_files(self._content.module, self._staged)
        except OSError as error:
            raise failure("making a directory", error, error.filename or self._staged, 0) from error

    def _write_small_files(self) -> dict[str, FileRecord]:
        """Index and ``training.json``; these and the configuration with their checksums."""
        large = {file.name for file in self._planned}
        if self._index is not None:
            write_small_file(os.path.join(self._staged, INDEX_NAME), self._index.encode())
        write_small_file(os.path.join(self._staged, TRAINING_NAME), self._training)
        try:
            names = sorted(name for name in os.listdir(self._staged) if name not in large)
        except OSError as error:
            raise failure("writing", error, self._staged, 0) from error
        return {name: _recorded(os.path.join(self._staged, name)) for name in names}


def written_by() -> str:
    """What the manifest says about who wrote it."""
    package = importlib.import_module(__name__.partition(".")[0])  # by name: the package imports this module
    return f"deepoffload {package.__version__}"


def _nothing() -> None:
    """Nobody waits."""


def _nothing_of(nbytes: int) -> None:
    """Another rank tells how far the save has come."""


def _recorded(path: str) -> FileRecord:
    """Put a file on the disk, and take its checksums."""
    try:
        sync_file(path)
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise failure("writing", error, path, 0) from error
    sums = tuple(crc32c_of(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
    return FileRecord(len(data), sums)
