"""``load_pretrained``: safetensors files into a model, each rank's ranges alone, inside the budget."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.expressions import Part, slabs
from deepoffload.checkpoint.plain_files import FileTensor, PlainFile, open_files
from deepoffload.checkpoint.plain_reader import PlainReader
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.ranks_loading import PartsToLoad, digests, refuse_other_files
from deepoffload.checkpoint.several_ranks import all_ranks
from deepoffload.checkpoint.shard_filling import OwnPart, fill_shard, needed_bytes
from deepoffload.checkpoint.weights import (
    HasModule,
    Target,
    WeightOpener,
    WeightPlan,
    discard_replaced,
    names_of_shared,
    plan_weights,
    unwrapped,
)
from deepoffload.checkpoint.weights_loading import listed
from deepoffload.config.units import format_bytes
from deepoffload.errors import UsageError
from deepoffload.io.mapped_origin import SourceRange
from deepoffload.memory.lock import SHIELD
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle
from deepoffload.ranks.joint_task import JointTask
from deepoffload.runtime.backing import back_unit
from deepoffload.runtime.construct import move_to_checkpoint


class LoadedKeys(NamedTuple):
    """What ``load_pretrained`` has found: as ``load_state_dict`` returns it.

    Attributes:
        missing_keys: names of the model that no file has; they keep their values.
        unexpected_keys: names in the files that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(model: nn.Module | HasModule, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedKeys:
    """Read weights and buffers from safetensors files into ``model``, inside or after its ``offload_context``.

    The model gets the values that ``model.load_state_dict(load_file(path), strict)`` gives it, in the types that it
    has, but the files are never in memory as a whole: what needs no conversion is read straight to where it is stored.
    With ``inference = true`` it is not even copied: it is read from the files when it is used. (After the context whole
    units are: where one parameter of a unit needs a conversion, all of it is copied.)
    Tied weights need one of their names. For models of transformers the files have the names of the hub, as
    ``save_pretrained`` writes them, or those of the state dict.

    With several ranks call it on all of them, with the same files. Each rank reads its own part of every weight. One
    whose elements lie in another order in memory than in the file (a transposed weight) is read whole by all.

    Args:
        model: any module, paged in part, in whole or not at all; also what ``initialize`` returns.
        path: a file, a directory with ``model.safetensors`` or its index, or an index.
        strict: names that only one side has are an error.

    Raises:
        UsageError: a file is missing, cut off or damaged, a shape does not fit, or, if ``strict``, a name. The message
            names file and tensor, and nothing has been changed. With several ranks: their files differ.
        IoFailure: a transfer failed; a part is loaded then. UnsupportedError, ClosedError: as ``save_pretrained``.
        RankError: another rank has gone, or does not call this.
    """
    module = unwrapped(model, "load_pretrained")
    with ExitStack() as last, all_ranks(module, "load_pretrained") as task:
        files = open_files(path)
        loading = _match(module, files, strict=strict)
        parts = None
        if task is not None:
            found = digests(files)
            refuse_other_files(task, found)
            parts = PartsToLoad(found, loading.written())
            last.callback(parts.finish)
        with outside_user_modes():
            _leave_in_files(loading, files)
            discard_replaced(loading.written())
            SHIELD.let_through(_load, (loading, files, os.fspath(path), parts, task))
    return loading.keys


@dataclass(frozen=True)
class _Loading:
    """Stored tensors with the parts of the model that they go into, checked against each other."""

    plan: WeightPlan
    opener: WeightOpener
    stored: dict[str, FileTensor]
    keys: LoadedKeys

    def parts(self, name: str) -> Iterator[tuple[Part, Target]]:
        for part in self.plan.expressions.parts(self.plan.tensors[name]):
            yield part, self.opener.targets[part.source.open]

    def forget(self, name: str) -> None:
        """Load this one no more: the model has its values."""
        for part, _ in list(self.parts(name)):
            self.opener.targets.pop(part.source.open, None)
        del self.stored[name]

    def written(self) -> Counter[ParamHandle]:
        """How many elements of each paged parameter are going to be written."""
        found: Counter[ParamHandle] = Counter()
        for name in self.stored:
            for part, target in self.parts(name):
                if isinstance(target, ParamHandle):
                    found[target] += part.stop - part.start
        return found


def _match(module: nn.Module, files: Sequence[PlainFile], *, strict: bool) -> _Loading:
    """Compare names and shapes; changes nothing."""
    found = {name: tensor for file in files for name, tensor in file.tensors.items()}
    ways = [_with_names(module, found, hub_names=False)]
    if transformers_format.is_pretrained_model(module):
        ways.insert(0, _with_names(module, found, hub_names=True))
    loading = min(ways, key=lambda way: len(way.keys.missing_keys) + len(way.keys.unexpected_keys))
    missing, unexpected = loading.keys
    directory = os.path.dirname(files[0].path)
    where = files[0].path if len(files) == 1 else f"the {len(files)} files in {directory}"
    if strict and (missing or unexpected):
        differs = listed("missing there:", missing) + listed("unknown to the model:", unexpected)
        raise UsageError(f"{where} does not have the names of the model; {differs}strict=False loads the others")
    wrong = [
        f"{name} of {os.path.basename(tensor.path)} is {list(tensor.shape)}, the model's is {list(want.shape)}"
        for name, want in loading.plan.tensors.items()
        if (tensor := loading.stored.get(name)) is not None and tensor.shape != tuple(want.shape)
    ]
    if wrong:
        raise UsageError(f"{where} does not fit the model: {listed('other shapes:', wrong)}nothing has been loaded")
    for name in loading.stored:
        list(loading.parts(name))  # raises where a stored tensor cannot be taken apart
    return loading


def _with_names(module: nn.Module, found: Mapping[str, FileTensor], *, hub_names: bool) -> _Loading:
    opener = WeightOpener(to_write=True)
    plan = plan_weights(module, hub_names=hub_names, opener_of=opener.opener_of)
    stored = {name: found[name] for name in plan.tensors if name in found}
    others = {name for name in plan.metadata if name in found}
    for names in names_of_shared(module.state_dict(keep_vars=True)):
        kept = next((name for name in names if name in plan.tensors), None)
        last = next((name for name in reversed(names) if name in found), None)
        if kept is not None and last is not None:
            stored[kept] = found[last]  # each name is written in turn, as load_state_dict does it
    missing = [name for name in plan.tensors if name not in stored]
    unexpected = [name for name in found if name not in plan.tensors and name not in others]
    return _Loading(plan, opener, stored, LoadedKeys(missing, unexpected))


def _leave_in_files(loading: _Loading, files: Sequence[PlainFile]) -> None:
    """With ``inference = true`` weights that a file has as the model stores them are read from there when they are
    used: single ones while the model is built, whole units after that."""
    statuses = {file.path: file.status for file in files}
    names: dict[ParamHandle, str] = {}
    origins: dict[ParamHandle, SourceRange] = {}
    for name, tensor in loading.stored.items():
        parts = list(loading.parts(name))
        part, handle = parts[0] if len(parts) == 1 else (None, None)
        if part is None or not isinstance(handle, ParamHandle) or not _is_whole(part, handle):
            continue
        found = cast(Pager, handle.pager).origins
        if found is None or tensor.dtype is not handle.dtype or tensor.begin % handle.itemsize:
            continue
        origin = found.range_in(tensor.path, statuses[tensor.path], tensor.begin, handle.nbytes)
        if origin is not None:
            names[handle], origins[handle] = name, origin
    for handle, origin in origins.items():
        if handle.unit is None and move_to_checkpoint(handle, origin):
            loading.forget(names[handle])
    for unit in {handle.unit: None for handle in origins if handle.unit is not None}:
        if back_unit(unit, origins):
            for handle in unit.handles:
                loading.forget(names[handle])


def _is_whole(part: Part, handle: ParamHandle) -> bool:
    """Whether a part is all elements of a parameter, in the order of memory."""
    every = part.start == 0 and part.stop == part.view.numel() == handle.numel
    return every and part.offset_numel == 0 and part.view.is_contiguous()


def _load(
    loading: _Loading, files: Sequence[PlainFile], path: str, parts: PartsToLoad | None, task: JointTask | None
) -> None:
    if not loading.stored:
        return

    def own(target: Target) -> OwnPart | None:
        return None if parts is None else parts.of(target)

    def advance(nbytes: int) -> None:
        progress.advance(nbytes)
        if task is not None:
            task.alive()

    total_bytes = sum(
        needed_bytes(tensor, part, own(target))
        for name, tensor in loading.stored.items()
        for part, target in loading.parts(name)
    )
    progress = Progress(total_bytes, f"loading {path}", f"loaded {format_bytes(total_bytes)} of {path}")
    reader = PlainReader(files, advance)
    try:
        for name, tensor in sorted(loading.stored.items(), key=lambda item: (item[1].path, item[1].begin)):
            done = 0
            for part, target in loading.parts(name):
                mine = own(target)
                if mine is not None:
                    fill_shard(reader, tensor, part, mine, done)
                else:
                    _fill(reader, tensor, part, done)
                done += part.stop - part.start
        reader.check()
    finally:
        reader.close()
    progress.done()


def _fill(reader: PlainReader, tensor: FileTensor, part: Part, start: int) -> None:
    """Write a part of what the model shows. ``start``: its first element in the file."""
    with part.opened() as shown:
        if shown.is_contiguous() and shown.is_cpu and shown.dtype is tensor.dtype:
            view = shown.view(-1)[part.start : part.stop]
            if view.numel():
                reader.read_into(view.data_ptr(), tensor, start, view.numel())
            return
        write(reader, tensor, start, lambda: slabs(shown, part.start, part.stop, reader.window_numel(tensor)))


def write(reader: PlainReader, tensor: FileTensor, start: int, views: Callable[[], Iterator[Tensor]]) -> None:
    """Write elements of the file from ``start`` on to one view after the other, in the type of these."""
    pieces = reader.pieces(tensor, start, (view.numel() for view in views()))
    for view, values in zip(views(), pieces, strict=True):
        view.copy_(values.view(view.shape))
