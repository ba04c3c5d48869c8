"""The files of a DeepSpeed checkpoint: which there are, and what the small values in them say."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepoffload.checkpoint.convert.archive import ByteSource
from deepoffload.checkpoint.convert.pickle_reader import Record
from deepoffload.checkpoint.convert.plain import PlainValues
from deepoffload.checkpoint.convert.tensors import Values
from deepoffload.checkpoint.convert.torch_reader import TorchFile, TorchTensor
from deepoffload.errors import UnsupportedError, UsageError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
STEP = "step"

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_FILES_MAX = 16384
_DIMS_MAX = 64

_ADAM_ARRAYS = frozenset({"exp_avg", "exp_avg_sq"})
_GROUP_SETTINGS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "bias_correction"),
    *("decoupled_weight_decay", "momentum", "dampening", "nesterov", "lr_decay"),
)
OWN_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "num_experts", "ds_autoep_layers", "universal_checkpoint_info"),
        *("checkpoint_parallel_dimensions", "autoep_layers"),
    )
)


def read_file(path: str) -> dict[str, Any]:
    """The dict that a file holds.

    Raises:
        UsageError: it is missing or damaged, or holds something else.
    """
    value = TorchFile(ByteSource(path)).value
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__} and no dict: it is no file of a DeepSpeed checkpoint")
    return value


@dataclass(frozen=True)
class CheckpointFiles:
    """Names of the files by rank."""

    folder: str
    optimizer: Mapping[int, str]
    model: Mapping[int | None, str]

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def files_in(folder: str) -> CheckpointFiles:
    """The files of a folder.

    Raises:
        UsageError: it cannot be read. UnsupportedError: it was trained with tensor, pipeline or expert parallelism.
    """
    names = names_in(folder)
    optimizer: dict[int, str] = {}
    model: dict[int | None, str] = {}
    for name in names:
        found = _OPTIMIZER_FILE.fullmatch(name)
        if found:
            _refuse_parallel(folder, name, int(found[2]))
            optimizer[int(found[1])] = name
        found = _MODEL_FILE.fullmatch(name)
        if found:
            _refuse_parallel(folder, name, int(found[2]))
            model[None if found[1] is None else int(found[1])] = name
        elif name.startswith("layer_") or re.match(r"expp_rank_|expert_", name):
            raise UnsupportedError(f"{folder} has {name}: checkpoints of pipelines and of experts are not read")
    return CheckpointFiles(folder, optimizer, model)


def names_in(folder: str) -> list[str]:
    """The names in a folder, in order."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_FILES_MAX + 1), strict=False)]
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror})") from error
    if len(names) > _FILES_MAX:
        raise UsageError(f"{folder} has more than {_FILES_MAX} files; it is no checkpoint")
    return sorted(names)


def _refuse_parallel(folder: str, name: str, model_rank: int) -> None:
    if model_rank:
        raise UnsupportedError(
            f"{folder} has {name}: it was trained with tensor parallelism, whose parts are not put together here; "
            "convert it with DeepSpeed's ds_to_universal.py first"
        )


def tag_folder(directory: str, latest: str, tag: str | None) -> str:
    """The folder of a tag, of the one that the file ``latest`` names, or ``directory`` itself when it is one.

    Raises:
        UsageError: there is none.
    """
    if tag is None:
        path = os.path.join(directory, latest)
        if not os.path.lexists(path):
            return directory
        source = ByteSource(path)
        try:
            tag = source.read(0, min(source.nbytes, 1024)).decode().strip()
        except UnicodeDecodeError:
            raise UsageError(f"{path} is damaged; name the tag") from None
    if not tag or tag in (".", "..") or "/" in tag or "\0" in tag:
        raise UsageError(f"{tag[:80]!r} cannot be the name of a folder in {directory}; name the tag")
    return os.path.join(directory, tag)


# -- values ----------------------------------------------------------------------------------------------------------


def whole(value: Any, what: str) -> int:
    """A number that counts something."""
    if isinstance(value, TorchTensor):
        value = number(value, what)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 1 << 60:
        raise UsageError(f"{what} is {type(value).__name__} and no number of steps, ranks or elements")
    return value


def number(value: Any, what: str) -> float:
    """A finite number, or a tensor that holds one."""
    if isinstance(value, TorchTensor):
        if value.shape not in ((), (1,)):
            raise UsageError(f"{what} is a tensor of shape {value.shape} and no number")
        value = value.read(0, 1).item()
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) >= 1 << 60:
        raise UsageError(f"{what} is a {type(value).__name__} that is no number, or none that can be used")
    return float(value)


def enum_value(value: Any) -> Any:
    """The number behind a member of an enumeration."""
    return value.args[0] if isinstance(value, Record) and isinstance(value.args, tuple) and value.args else value


def mapping(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} is a {type(value).__name__} and no dict")
    return value


def listing(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{what} is a {type(value).__name__} and no list")
    return list(value)


def tensor(value: Any, what: str) -> TorchTensor:
    if not isinstance(value, TorchTensor):
        raise UsageError(f"{what} is a {type(value).__name__} and no tensor")
    return value


def shapes(value: Any, what: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name of a parameter."""
    found = {}
    for name, shape in mapping(value, what).items():
        if type(name) is not str:
            raise UsageError(f"{what} has a key that is no name")
        dims = tuple(listing(shape, f"the shape of {name[:80]}"))
        if len(dims) > _DIMS_MAX:
            raise UsageError(f"the shape of {name[:80]} has {len(dims)} dimensions")
        found[name] = tuple(whole(dim, f"the shape of {name[:80]}") for dim in dims)
    return found


def aliases_of(model: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Further names of tied weights, with the name under which each is stored."""
    found = mapping(model.get("shared_params") or {}, f"{where}: shared_params")
    if any(type(name) is not str or type(kept) is not str for name, kept in found.items()):
        raise UsageError(f"{where}: shared_params has what is no name")
    return dict(found)


def tensors_of(module: Any, where: str) -> dict[str, TorchTensor]:
    """The tensors of a model's state by name."""
    held = mapping(module, f"{where}: module")
    return {name: value for name, value in held.items() if type(name) is str and isinstance(value, TorchTensor)}


def settings_of(group: Any, what: str) -> dict[str, Any]:
    """The settings of a parameter group that optimizers of other libraries have, too."""
    plain = PlainValues(what)
    kept = {key: value for key, value in mapping(group, what).items() if key in _GROUP_SETTINGS}
    made = {key: plain.of(value, str(key)) for key, value in kept.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in made.items()}


def kind_of_arrays(arrays: Mapping[str, Mapping[str, Values]], groups: Sequence[Mapping[str, Any]]) -> str:
    """Which optimizer has such arrays."""
    keys = {key for held in arrays.values() for key in held}
    if keys >= _ADAM_ARRAYS or (not keys and any("betas" in group for group in groups)):
        return "adam"
    if keys == {"sum"}:
        return "adagrad"
    if keys == {"exp_avg"}:
        return "lion"
    if keys <= {"momentum_buffer"}:
        return "sgd"
    raise UnsupportedError(f"an optimizer with the arrays {sorted(keys)} is not known")


# -- what a model file says ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bookkeeping:
    """Counters and states of a run."""

    steps: int
    others: dict[str, Any]
    client_state: dict[str, Any]


def bookkeeping(state: Mapping[Any, Any], where: str, scaler: Any) -> Bookkeeping:
    """What the engine, its schedule and the program have added to a model file.

    Args:
        scaler: the loss scaler of an optimizer file.
    """
    plain = PlainValues(where)
    if "global_steps" not in state:
        raise UsageError(f"{where}: its model file has no global_steps, the number of steps: it is not complete")
    steps = whole(state["global_steps"], f"{where}: global_steps")
    config = state.get("ds_config")
    accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    loop = {
        "micro_steps": steps * (accumulation if type(accumulation) is int and 0 < accumulation < 1 << 30 else 1),
        "updates": steps,
        "skipped": whole(state.get("skipped_steps", 0), f"{where}: skipped_steps"),
        "applied": True,
        "grad_norm": None,
        "loss_scale": _loss_scale(scaler, where),
    }
    others = {"loop": loop}
    schedule = state.get("lr_scheduler")
    if isinstance(schedule, dict):
        others["scheduler"] = _schedule(plain.of(schedule, "lr_scheduler"))
    client = {key: plain.of(value, str(key)) for key, value in state.items() if key not in OWN_KEYS}
    plain.report()
    return Bookkeeping(steps, others, client)


def _schedule(state: dict[str, Any]) -> dict[str, Any]:
    """A state of DeepSpeed's schedules as torch's have it; torch's own as they are."""
    last = state.get("last_batch_iteration")
    if type(last) is not int:
        return state
    return {"last_epoch": last + 1, "_step_count": last + 2}


def _loss_scale(scaler: Any, where: str) -> dict[str, float]:
    if not isinstance(scaler, Record) or scaler.field("cur_hysteresis") is None:
        return {}
    names = {"value": "cur_scale", "left": "cur_hysteresis", "steps": "cur_iter", "last_overflow": "last_overflow_iter"}
    return {ours: number(scaler.field(theirs), f"{where}: {theirs}") for ours, theirs in names.items()}
