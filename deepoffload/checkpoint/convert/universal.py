"""DeepSpeed's universal checkpoints: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, and the files that its
engine reads next to them (DeepSpeed 0.19: ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``).

ZeRO-1 and 2 load a dict with the key ``param``, and the step of each parameter. ZeRO-3 loads the same dict, or a flat
tensor, and the step of ``optimizer_state.pt``. What is written here has both.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.convert.archive import ByteSource
from deepoffload.checkpoint.convert.completeness import check_complete
from deepoffload.checkpoint.convert.deepspeed_files import (
    LATEST_UNIVERSAL,
    OWN_KEYS,
    STEP,
    CheckpointFiles,
    aliases_of,
    bookkeeping,
    files_in,
    kind_of_arrays,
    listing,
    mapping,
    names_in,
    number,
    read_file,
    settings_of,
    shapes,
    tag_folder,
    tensor,
    tensors_of,
    whole,
)
from deepoffload.checkpoint.convert.group_settings import for_deepspeed
from deepoffload.checkpoint.convert.output import new_folder
from deepoffload.checkpoint.convert.tensors import Computed, Reshaped, Values, in_fp32, nbytes_of
from deepoffload.checkpoint.convert.torch_reader import TorchFile
from deepoffload.checkpoint.convert.torch_writer import Streamed, write_torch_file
from deepoffload.checkpoint.convert.training_run import ADAM, GroupOfParams, TrainingRun
from deepoffload.checkpoint.convert.zero import buffers, check_buffers, frozen_parts
from deepoffload.checkpoint.tags import checked_tag
from deepoffload.errors import UnsupportedError, UsageError

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
FP32 = "fp32"
DEEPSPEED_VERSION = "0.19.8"
"""Whose format is written."""

_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FORMAT_VERSION = 0.4
_ARRAYS = ("exp_avg", "exp_avg_sq")


# -- reading ---------------------------------------------------------------------------------------------------------


def universal_folder(directory: str, tag: str | None = None) -> str:
    """The folder of a universal checkpoint: of a tag, of the one that ``latest_universal`` names, or ``directory``.

    Raises:
        UsageError: there is none.
    """
    folder = tag_folder(directory, LATEST_UNIVERSAL, tag)
    if not os.path.isdir(os.path.join(folder, ZERO_FOLDER)):
        raise UsageError(
            f"{folder} has no folder {ZERO_FOLDER!r}: it is no universal checkpoint; give the directory with the file "
            f"{LATEST_UNIVERSAL!r}, or the folder of a tag (one of DeepSpeed's ordinary ones is read by from-deepspeed)"
        )
    return folder


def read_universal(directory: str, tag: str | None = None) -> TrainingRun:
    """A checkpoint of DeepSpeed's ``ds_to_universal.py``, or of :func:`write_universal`.

    Raises:
        UsageError: it is incomplete or damaged. UnsupportedError: it was trained with another parallelism than ZeRO's.
    """
    folder = universal_folder(directory, tag)
    files = files_in(folder)
    ranked = sorted(rank for rank in files.model if rank is not None)
    if not files.model:
        raise UsageError(
            f"{folder} has no file {_MODEL_FILES[0]}, nor {_MODEL_FILES[1]}: the checkpoint is not complete"
        )
    model = read_file(files.path(files.model[None if None in files.model else ranked[0]]))
    by_part = [shapes(part, "param_shapes") for part in listing(model.get("param_shapes"), f"{folder}: param_shapes")]
    known = {_checked_name(name, folder): shape for part in by_part for name, shape in part.items()}
    optimizer = read_file(os.path.join(folder, ZERO_FOLDER, OPTIMIZER_STATE))
    groups = _groups(optimizer, by_part, folder)
    steps = _common_steps(optimizer, groups, folder)
    weights: dict[str, Values] = {}
    arrays: dict[str, dict[str, Values]] = {}
    small: dict[str, dict[str, float]] = {}
    for name, shape in known.items():
        held, step = _read_param(os.path.join(folder, ZERO_FOLDER, name), shape)
        if FP32 not in held:
            raise UsageError(f"{os.path.join(folder, ZERO_FOLDER, name)} has no {FP32}.pt: it is not complete")
        weights[name] = held.pop(FP32)
        arrays[name] = held
        step = steps.get(name) if step is None else step
        if step is not None:
            small[name] = {STEP: step}
    _check_files(arrays, small, os.path.join(folder, ZERO_FOLDER))
    aliases = aliases_of(model, folder)
    for name, values in _rest(files, model, known, ranked).items():
        if name not in aliases:
            weights[name] = values
    notes = bookkeeping(model, folder, optimizer.get("loss_scaler"))
    run = TrainingRun(
        source="a universal checkpoint of DeepSpeed",
        step=notes.steps,
        weights=weights,
        aliases=aliases,
        kind=kind_of_arrays(arrays, [group.settings for group in groups]),
        groups=groups,
        arrays=arrays,
        small={name: state for name, state in small.items() if arrays[name]},
        others=notes.others,
        client_state=notes.client_state,
    )
    check_complete(run, folder)
    return run


def _checked_name(name: str, where: str) -> str:
    """The name of a parameter as that of a folder.

    Raises:
        UsageError: it is none.
    """
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name) > 250:
        raise UsageError(f"{where}: {name[:80]!r} cannot be a parameter of a universal checkpoint: it names a folder")
    return name


def _check_files(
    arrays: Mapping[str, Mapping[str, Values]], small: Mapping[str, Mapping[str, float]], folder: str
) -> None:
    """DeepSpeed writes the same files for every parameter, so one without them has lost its files."""
    expected = {key for held in arrays.values() for key in held} | {key for held in small.values() for key in held}
    for name, held in arrays.items():
        lacking = ", ".join(f"{key}.pt" for key in sorted(expected - held.keys() - small.get(name, {}).keys()))
        if lacking:
            raise UsageError(
                f"{os.path.join(folder, name)} has no {lacking}, which other parameters have: the checkpoint is not "
                "complete; copy it again"
            )


def _groups(optimizer: Mapping[Any, Any], by_part: list[dict[str, tuple[int, ...]]], where: str) -> list[GroupOfParams]:
    saved = listing(optimizer.get("param_groups"), f"{where}: param_groups of {OPTIMIZER_STATE}")
    groups = []
    for index, group in enumerate(saved):
        numbers = listing(mapping(group, where).get("params", [index]), where)
        parts = [whole(item, f"{where}: param_groups") for item in numbers]
        if any(part >= len(by_part) for part in parts):
            raise UsageError(f"{where} has a parameter group of sub-groups that are not there")
        groups.append(GroupOfParams(settings_of(group, where), [name for part in parts for name in by_part[part]]))
    if sorted(name for group in groups for name in group.names) != sorted(name for part in by_part for name in part):
        raise UsageError(f"{where}: its parameter groups and its parameters do not agree")
    return groups


def _common_steps(optimizer: Mapping[Any, Any], groups: list[GroupOfParams], where: str) -> dict[str, float]:
    """Steps by parameter where the optimizer's file has them: one for all (ZeRO-3), or one of each group."""
    inner = optimizer.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    first = states.get(0) if isinstance(states, dict) else None
    common = first.get(STEP) if isinstance(first, dict) else None
    found = {}
    for saved, group in zip(listing(optimizer.get("param_groups"), where), groups, strict=True):
        step = mapping(saved, where).get(STEP) if common is None else common
        if step is not None:
            found.update(dict.fromkeys(group.names, number(step, f"{where}: {STEP} in {OPTIMIZER_STATE}")))
    return found


def _read_param(folder: str, shape: tuple[int, ...]) -> tuple[dict[str, Values], float | None]:
    held: dict[str, Values] = {}
    step = None
    for file in names_in(folder):
        key, extension = os.path.splitext(file)
        path = os.path.join(folder, file)
        if extension != ".pt":
            continue
        value = TorchFile(ByteSource(path)).value
        if key == STEP:
            step = number(value, path)
            continue
        found = tensor(value.get("param") if isinstance(value, dict) else value, path)
        if math.prod(found.shape) != math.prod(shape):
            raise UsageError(f"{path} has {math.prod(found.shape)} elements, and the parameter {math.prod(shape)}")
        held[key] = Reshaped(in_fp32(found), shape)
    return held, step


def _rest(
    files: CheckpointFiles, model: Mapping[str, Any], known: Mapping[str, Any], ranked: list[int]
) -> dict[str, Values]:
    """Buffers and frozen weights."""
    if None in files.model:
        module = tensors_of(model.get("module"), files.folder)
        check_buffers(model, module, files)
        return {name: value for name, value in module.items() if name not in known}
    return {**dict(frozen_parts(files, model, len(ranked))), **buffers(files, model)}


# -- writing ---------------------------------------------------------------------------------------------------------


def write_universal(run: TrainingRun, directory: str, tag: str | None, progress: Callable[[int], None]) -> str:
    """Write ``directory/tag`` and ``latest_universal``; returns the tag.

    Raises:
        UsageError: the place is taken. UnsupportedError: no state of Adam, or parameters of one group that have made
        different numbers of steps. IoFailure: no room, or the disk failed.
    """
    if run.kind != ADAM:
        raise UnsupportedError(f"a universal checkpoint holds the state of Adam or AdamW, and this run has {run.kind}")
    name = checked_tag(f"global_step{run.step}_universal" if tag is None else tag)
    steps = _steps(run)
    for param in run.trained():
        _checked_name(param, "the run")
    stored_bytes = sum(nbytes_of(values) for values in run.weights.values())
    with new_folder(directory, run.nbytes + stored_bytes) as folder:
        place = os.path.join(folder, name)
        zero = os.path.join(place, ZERO_FOLDER)
        os.makedirs(zero)
        for param in run.trained():
            _write_param(run, param, os.path.join(zero, param), steps, progress)
        write_torch_file(os.path.join(zero, OPTIMIZER_STATE), _optimizer_state(run, steps), progress)
        model = _model_state(run)
        write_torch_file(os.path.join(place, _MODEL_FILES[0]), model, progress)
        write_torch_file(os.path.join(place, _MODEL_FILES[1]), {**model, "module": OrderedDict()}, progress)
        write_small_file(os.path.join(folder, LATEST_UNIVERSAL), name.encode())
    return name


def _steps(run: TrainingRun) -> int:
    found = {int(run.small.get(name, {}).get(STEP, 0)) for name in run.trained() if run.arrays.get(name)}
    if len(found) > 1:
        raise UnsupportedError(
            f"parameters have made different numbers of steps ({sorted(found)[:5]}); DeepSpeed counts one for all"
        )
    return found.pop() if found else 0


def _write_param(run: TrainingRun, name: str, folder: str, steps: int, progress: Callable[[int], None]) -> None:
    os.mkdir(folder)
    fp32 = in_fp32(run.exact(name))
    held = run.arrays.get(name, {})
    values = {FP32: fp32, **{key: held.get(key, _zeros(fp32)) for key in _ARRAYS}}
    values.update({key: array for key, array in held.items() if key not in values})
    for key, array in values.items():
        write_torch_file(os.path.join(folder, f"{key}.pt"), {"param": Streamed(array), "cat_dim": 0}, progress)
    write_torch_file(os.path.join(folder, f"{STEP}.pt"), _step(steps), progress)


def _zeros(like: Values) -> Values:
    return Computed(torch.float32, like.shape, lambda _, numel: torch.zeros(numel, dtype=torch.float32))


def _step(steps: int) -> torch.Tensor:
    """As torch's optimizers hold it; as an index it is an integer, too, which DeepSpeed's own want."""
    return torch.tensor(steps, dtype=torch.int64)


def _optimizer_state(run: TrainingRun, steps: int) -> dict[str, Any]:
    groups = [{**for_deepspeed(group.settings), "params": [index]} for index, group in enumerate(run.groups)]
    return {
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {STEP: _step(steps)}}, "param_groups": groups},
    }


def _model_state(run: TrainingRun) -> dict[str, Any]:
    trained = set(run.trained())
    module: OrderedDict[str, Any] = OrderedDict((name, Streamed(values)) for name, values in run.weights.items())
    module.update((name, module[kept]) for name, kept in run.aliases.items())
    loop, schedule = run.others.get("loop"), run.others.get("scheduler")
    loop = loop if isinstance(loop, dict) else {}
    extra = run.client_state if isinstance(run.client_state, dict) else {}
    return {
        **{key: value for key, value in extra.items() if key not in OWN_KEYS},
        "module": module,
        "buffer_names": [name for name in run.weights if name not in trained],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(run.weights[name].shape)) for name in group.names) for group in run.groups
        ],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": dict(run.aliases),
        "lr_scheduler": _schedule(schedule, run.step),
        "skipped_steps": int(loop.get("skipped", 0)),
        "global_steps": int(loop.get("updates", run.step)),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DEEPSPEED_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _FORMAT_VERSION},
    }


def _schedule(state: Any, steps: int) -> dict[str, Any]:
    """What DeepSpeed's schedules read, and what torch's do."""
    held = state if isinstance(state, dict) else {}
    last = held.get("last_epoch", steps)
    return {**held, "last_batch_iteration": (last if isinstance(last, int) else steps) - 1}
