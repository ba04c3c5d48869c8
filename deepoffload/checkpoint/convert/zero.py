"""Reads DeepSpeed's ZeRO-1, 2 and 3 checkpoints of any number of ranks.

Each rank has stored its part of flat tensors: of the fp32 weights, and of each array of optimizer state. ZeRO-1 and 2
cut the joined parameters of a group into equal parts, and each file says which elements of which parameter its part
holds. ZeRO-3 cuts every parameter into equal parts, which follow one another in the order of ``param_shapes``; the last
part of a parameter may be shorter than its place. (DeepSpeed 0.19: ``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``utils/zero_to_fp32.py``.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepoffload.checkpoint.convert.completeness import check_complete
from deepoffload.checkpoint.convert.deepspeed_files import (
    LATEST,
    STEP,
    CheckpointFiles,
    aliases_of,
    bookkeeping,
    enum_value,
    files_in,
    kind_of_arrays,
    listing,
    mapping,
    number,
    read_file,
    settings_of,
    shapes,
    tag_folder,
    tensor,
    tensors_of,
    whole,
)
from deepoffload.checkpoint.convert.pickle_reader import Record
from deepoffload.checkpoint.convert.tensors import Fragment, Joined, Partitioned, Values
from deepoffload.checkpoint.convert.torch_reader import TorchTensor
from deepoffload.checkpoint.convert.training_run import GroupOfParams, TrainingRun
from deepoffload.errors import UnsupportedError, UsageError

_FP32 = "fp32"
_RANKS_MAX = 8192


@dataclass
class _Parts:
    """What the ranks hold together.

    Attributes:
        values: by parameter and array; ``fp32`` is the weight itself.
        steps: by parameter.
        settings: of the groups. names: their parameters.
    """

    values: dict[str, dict[str, Values]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)


def read_zero(directory: str, tag: str | None = None) -> TrainingRun:
    """A checkpoint of DeepSpeed's ``save_checkpoint``.

    Args:
        directory: with the file ``latest``, or the folder of a tag.

    Raises:
        UsageError: it is incomplete or damaged. UnsupportedError: another parallelism than ZeRO's, no ZeRO at all, or
        optimizer state that was on NVMe.
    """
    folder = tag_folder(directory, LATEST, tag)
    files = files_in(folder)
    if not files.optimizer:
        raise UsageError(
            f"{folder} has no file *_optim_states.pt: it is no checkpoint of DeepSpeed's ZeRO (stages 1 to 3); "
            "give the directory with the file 'latest', or the folder of a tag"
        )
    ranks = sorted(files.optimizer)
    if ranks != list(range(len(ranks))) or len(ranks) > _RANKS_MAX:
        raise UsageError(f"{folder} lacks optimizer files: there are those of the ranks {str(ranks)[:200]}")
    first = _optimizer_of(files, 0)
    stage = whole(enum_value(first.get("zero_stage", 1)), f"{folder}: zero_stage")
    if os.path.isdir(os.path.join(folder, "offloaded_tensors")):
        raise UnsupportedError(
            f"{folder} was saved with optimizer state on NVMe, of which its files hold swap files only; save it from a "
            "run whose state is in memory"
        )
    return _read_stage3(files, len(ranks)) if stage == 3 else _read_stage12(files, len(ranks), stage)


def _optimizer_of(files: CheckpointFiles, rank: int) -> dict[Any, Any]:
    path = files.path(files.optimizer[rank])
    return mapping(read_file(path).get("optimizer_state_dict"), f"{path}: optimizer_state_dict")


def _model_of(files: CheckpointFiles, rank: int | None) -> dict[str, Any]:
    if rank not in files.model:
        what = "mp_rank_00_model_states.pt" if rank is None else f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        raise UsageError(f"{files.path(what)} is missing: the checkpoint is not complete")
    return read_file(files.path(files.model[rank]))


def _check_ranks(count: Any, ranks: int, where: str) -> None:
    counts = [whole(item, f"{where}: partition_count") for item in (count if isinstance(count, list) else [count])]
    if max(counts, default=0) != ranks:
        raise UsageError(
            f"{where} is one of {max(counts, default=0)} ranks, and there are files of {ranks}: some are missing or old"
        )


# -- ZeRO-1 and 2 ----------------------------------------------------------------------------------------------------


def _read_stage12(files: CheckpointFiles, ranks: int, stage: int) -> TrainingRun:
    model = _model_of(files, None)
    by_group = [shapes(group, "param_shapes") for group in listing(model.get("param_shapes"), "param_shapes")]
    known = {name: shape for group in by_group for name, shape in group.items()}
    parts = _Parts(names=[list(group) for group in by_group])
    fragments: dict[str, dict[str, list[Fragment]]] = {}
    scaler = None
    for rank in range(ranks):
        where = files.path(files.optimizer[rank])
        state = _optimizer_of(files, rank)
        _check_ranks(state.get("partition_count"), ranks, where)
        base = state.get("base_optimizer_state")
        if not isinstance(base, dict) or "param_slice_mappings" not in state:
            raise UnsupportedError(
                f"{where} does not say where its parameters lie (an elastic checkpoint, or one of an old DeepSpeed); "
                "load it there and save it again"
            )
        if rank == 0:
            parts.settings = [settings_of(group, where) for group in listing(base.get("param_groups"), where)]
            scaler = state.get("loss_scaler")
        flat = listing(state.get("single_partition_of_fp32_groups"), where)
        mappings = listing(state["param_slice_mappings"], where)
        if not len(flat) == len(mappings) == len(by_group) == len(parts.settings):
            raise UsageError(f"{where} and the model's file have different numbers of parameter groups")
        for index, slices in enumerate(mappings):
            arrays, step = _arrays_of(base, index, flat[index], where)
            for name, address in mapping(slices, f"{where}: param_slice_mappings").items():
                if name not in known or not isinstance(address, Record):
                    raise UsageError(f"{where} places {str(name)[:80]}, which the model's file does not have")
                start, numel = (whole(address.field(key), f"{where}: {name[:80]}") for key in ("start", "numel"))
                for key, flat_array in arrays.items():
                    if start + numel > flat_array.shape[0]:
                        raise UsageError(f"{where}: {name[:80]} lies behind the end of the rank's {key[:80]}")
                    held = fragments.setdefault(name, {}).setdefault(key, [])
                    held.append(Fragment(flat_array, start, numel))
                if step is not None:
                    parts.steps[name] = step
    for name, by_key in fragments.items():
        parts.values[name] = {key: _joined(f"{name}.{key}", known[name], held) for key, held in by_key.items()}
    module = tensors_of(model.get("module"), files.folder)
    rest = {name: value for name, value in module.items() if name not in known}
    return _run(_source(stage, ranks), files, model, known, parts, rest, scaler)


def _arrays_of(
    base: Mapping[Any, Any], index: int, fp32: Any, where: str
) -> tuple[dict[str, TorchTensor], float | None]:
    """The flat arrays of a group or sub-group, and its step count where it has one."""
    state = mapping(mapping(base.get("state"), f"{where}: state").get(index, {}), f"{where}: state of {index}")
    arrays = {_FP32: tensor(fp32, f"{where}: fp32 weights of group {index}")}
    if len(arrays[_FP32].shape) != 1:
        raise UsageError(f"{where}: the fp32 weights of group {index} are not flat")
    (numel,) = arrays[_FP32].shape
    for key, value in state.items():
        if isinstance(value, TorchTensor) and len(value.shape) == 1 and key != STEP:
            if value.shape[0] < numel:
                raise UnsupportedError(f"{where}: {str(key)[:80]} of group {index} is not stored next to its weights")
            arrays[str(key)] = value
    groups = listing(base.get("param_groups"), f"{where}: param_groups")
    of_group = groups[index].get(STEP) if index < len(groups) and isinstance(groups[index], dict) else None
    step = state.get(STEP, of_group)
    return arrays, None if step is None else number(step, f"{where}: step")


# -- ZeRO-3 ----------------------------------------------------------------------------------------------------------


def _read_stage3(files: CheckpointFiles, ranks: int) -> TrainingRun:
    model = _model_of(files, 0)
    by_part = [shapes(part, "param_shapes") for part in listing(model.get("param_shapes"), "param_shapes")]
    known = {name: shape for part in by_part for name, shape in part.items()}
    parts = _Parts()
    flats: list[dict[str, list[TorchTensor]]] = [{} for _ in by_part]
    scaler = None
    for rank in range(ranks):
        where = files.path(files.optimizer[rank])
        state = _optimizer_of(files, rank)
        _check_ranks(state.get("partition_count"), ranks, where)
        base = mapping(state.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
        flat = listing(state.get("fp32_flat_groups"), where)
        if len(flat) != len(by_part):
            raise UsageError(f"{where} has {len(flat)} sub-groups, and the model's file {len(by_part)}")
        if rank == 0:
            scaler = state.get("loss_scaler")
            _name_groups(parts, base, by_part, where)
        for index, shapes_of_part in enumerate(by_part):
            arrays, step = _arrays_of(base, index, flat[index], where)
            for key, flat_array in arrays.items():
                flats[index].setdefault(key, []).append(flat_array)
            if step is not None:
                parts.steps.update(dict.fromkeys(shapes_of_part, step))
    for shapes_of_part, held in zip(by_part, flats, strict=True):
        parts.values.update(_partitioned(shapes_of_part, held, ranks, files.folder))
    rest: dict[str, Values] = {**dict(frozen_parts(files, model, ranks)), **buffers(files, model)}
    return _run(_source(3, ranks), files, model, known, parts, rest, scaler)


def _partitioned(
    of_part: Mapping[str, tuple[int, ...]], flats: Mapping[str, list[TorchTensor]], ranks: int, where: str
) -> Iterator[tuple[str, dict[str, Values]]]:
    """The parameters of a sub-group, which follow one another in the flat tensors of every rank.

    Raises:
        UsageError: a flat tensor is missing, or too short.
    """
    for key, held in flats.items():
        if len(held) != ranks or len({flat.dtype for flat in held}) > 1:
            raise UsageError(f"{where}: not all ranks have {key[:80]} of all parameters, or in different types")
    begin = 0
    for name, shape in of_part.items():
        numel = math.prod(shape)
        part_numel = -(-numel // ranks)
        for key, held in flats.items():
            for rank, flat in enumerate(held):
                if begin + max(0, min(part_numel, numel - rank * part_numel)) > flat.shape[0]:
                    raise UsageError(f"{where}: {name[:80]} lies behind the end of {key[:80]} of rank {rank}")
        yield name, {key: Partitioned(shape, held, begin, max(1, part_numel)) for key, held in flats.items()}
        begin += part_numel


def _name_groups(parts: _Parts, base: Mapping[Any, Any], by_part: list[dict[str, tuple[int, ...]]], where: str) -> None:
    for group in listing(base.get("param_groups"), f"{where}: param_groups"):
        numbers = [whole(index, where) for index in listing(mapping(group, where).get("params"), where)]
        if any(index >= len(by_part) for index in numbers):
            raise UsageError(f"{where} has a parameter group of sub-groups that are not there")
        parts.settings.append(settings_of(group, where))
        parts.names.append([name for index in numbers for name in by_part[index]])


def check_buffers(model: Mapping[str, Any], module: Mapping[Any, Any], files: CheckpointFiles) -> None:
    """Check that a model file has the buffers that it names. One of several model files may have names alone.

    Raises:
        UsageError: it lacks some.
    """
    names = listing(model.get("buffer_names", []), "buffer_names")
    lacking = [str(name)[:80] for name in names if not isinstance(name, str) or name not in module]
    if lacking:
        raise UsageError(
            f"{files.folder}: its model file has no values of {', '.join(lacking[:5])}, which it names among its "
            "buffers: another *_model_states.pt is missing; copy the checkpoint again"
        )


def buffers(files: CheckpointFiles, model: Mapping[str, Any]) -> dict[str, Values]:
    """The buffers of a model file of ZeRO-3. Raises as :func:`check_buffers`."""
    module = mapping(model.get("module"), "module")
    check_buffers(model, module, files)
    names = listing(model.get("buffer_names", []), "buffer_names")
    return {name: tensor(module[name], f"the buffer {name[:80]}") for name in names}


def frozen_parts(files: CheckpointFiles, model: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, Values]]:
    """Frozen weights, of which each rank's model file has a part."""
    frozen = shapes(model.get("frozen_param_shapes") or {}, "frozen_param_shapes")
    if not frozen:
        return
    fragments: dict[str, list[Fragment]] = {name: [] for name in frozen}
    for rank in range(ranks):
        held = mapping(_model_of(files, rank).get("frozen_param_fragments"), "frozen_param_fragments")
        for name, shape in frozen.items():
            part = tensor(held.get(name), f"the frozen {name[:80]} of rank {rank}")
            numel = max(0, min(math.prod(part.shape), math.prod(shape) - rank * math.prod(part.shape)))
            fragments[name].append(Fragment(part, 0, numel))
    for name, shape in frozen.items():
        yield name, _joined(name, shape, fragments[name])


def _source(stage: int, ranks: int) -> str:
    return f"DeepSpeed ZeRO-{stage}, {ranks} rank{'' if ranks == 1 else 's'}"


# -- both ------------------------------------------------------------------------------------------------------------


def _run(
    source: str,
    files: CheckpointFiles,
    model: Mapping[str, Any],
    known: Mapping[str, tuple[int, ...]],
    parts: _Parts,
    rest: Mapping[str, Values],
    scaler: Any,
) -> TrainingRun:
    """What the parts make together.

    Args:
        known: shapes of the trained parameters. rest: frozen weights and buffers.
    """
    aliases = aliases_of(model, files.folder)
    weights: dict[str, Values] = {}
    arrays: dict[str, dict[str, Values]] = {}
    for name in known:
        held = parts.values.get(name, {})
        if _FP32 not in held:
            raise UsageError(f"{files.folder}: no rank has a part of {name[:80]}")
        weights[name] = held[_FP32]
        arrays[name] = {key: values for key, values in held.items() if key != _FP32}
    for name, values in rest.items():
        if name not in aliases:
            weights[name] = values
    if sorted(name for group in parts.names for name in group) != sorted(known):
        raise UsageError(f"{files.folder}: its parameter groups and its parameters do not agree")
    notes = bookkeeping(model, files.folder, scaler)
    small = {name: {STEP: step} for name, step in parts.steps.items() if arrays[name]}
    run = TrainingRun(
        source=source,
        step=notes.steps,
        weights=weights,
        aliases=aliases,
        kind=kind_of_arrays(arrays, parts.settings),
        groups=[GroupOfParams(group, names) for group, names in zip(parts.settings, parts.names, strict=True)],
        arrays=arrays,
        small=small,
        others=notes.others,
        client_state=notes.client_state,
    )
    check_complete(run, files.folder)
    return run


def _joined(name: str, shape: tuple[int, ...], fragments: list[Fragment]) -> Joined:
    total = sum(fragment.numel for fragment in fragments)
    if total != math.prod(shape):
        raise UsageError(f"{name[:80]} has {math.prod(shape)} elements, and the ranks together hold {total}")
    if len({fragment.values.dtype for fragment in fragments}) > 1:
        raise UsageError(f"the ranks hold {name[:80]} in different types")
    return Joined(shape, fragments)
