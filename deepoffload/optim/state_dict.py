"""``state_dict`` in torch's layout, and back.

torch's own ``load_state_dict`` casts every array to the parameter's type, which would lose the fp32 moments of 16-bit
parameters, and it knows no paged ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.optim.ordinary import import_state
from deepoffload.optim.state_shards import SHARDS, ShardEntry, check_record, own_shape, record_of
from deepoffload.optim.state_values import check_value
from deepoffload.params.torch_private import optimizer_hooks
from deepoffload.params.unit import ParamHandle

Group = dict[str, Any]

_OWN_SETTINGS = ("state_dtype", "master_weights")
"""How the optimizer stores things: not taken from a loaded state, which is in fp32."""


def pack(
    optimizer: Any, state: Mapping[Any, Any], export_group: Callable[[Group], Group], *, shards: bool = False
) -> dict[str, Any]:
    """``state`` and the optimizer's groups with numbers for parameters; torch's hooks are called.

    Args:
        shards: ``state`` has what this rank owns of paged parameters.
    """
    for hook in optimizer_hooks(optimizer, "state_dict_pre"):
        hook(optimizer)
    params: dict[int, Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        params.update({id(param): param for param in group["params"]})
    numbers = {key: number for number, key in enumerate(params)}
    for group in optimizer.param_groups:
        packed_group = {key: value for key, value in export_group(group).items() if key != "params"}
        groups.append({**packed_group, "params": [numbers[id(param)] for param in group["params"]]})
    packed: dict[str, Any] = {
        "state": {numbers[id(key)] if isinstance(key, Tensor) else key: value for key, value in state.items()},
        "param_groups": groups,
    }
    record = record_of({numbers[key]: slot_of(param) for key, param in params.items()}) if shards else None
    if record is not None:
        packed[SHARDS] = record
    for hook in optimizer_hooks(optimizer, "state_dict_post"):
        changed = hook(optimizer, packed)
        packed = packed if changed is None else changed
    return packed


def load_into(
    optimizer: Any,
    state_dict: Mapping[str, Any],
    import_group: Callable[[Group], Group],
    check_group: Callable[[Group], None],
    import_entry_of: Callable[[Mapping[str, Any], Tensor, Group], dict[str, Any]],
    checks: AbstractContextManager[object],
) -> None:
    """Check all of ``state_dict``, inside of ``checks``, then hand it to ``optimizer.__setstate__``."""
    with checks:
        loaded = dict(state_dict)
        for hook in optimizer_hooks(optimizer, "load_state_dict_pre"):
            changed = hook(optimizer, loaded)
            loaded = loaded if changed is None else changed
        for key in ("param_groups", "state"):
            if key not in loaded:
                raise ValueError(f"the loaded state has no {key!r}: it is no state_dict() of an optimizer")
        groups = match_groups(optimizer.param_groups, loaded["param_groups"], import_group)
        for group in groups:
            check_group(group)
        params: dict[Any, tuple[Tensor, Group]] = {}
        for saved, group in zip(loaded["param_groups"], groups, strict=True):
            params.update(
                {number: (param, group) for number, param in zip(saved["params"], group["params"], strict=True)}
            )
        cut = SHARDS in loaded
        if cut:
            check_record(loaded[SHARDS], {number: slot_of(param) for number, (param, _) in params.items()})
        state: defaultdict[Any, Any] = defaultdict(dict)
        for number, entry in loaded["state"].items():
            if number not in params:
                state[number] = entry  # torch keeps what belongs to no parameter, too
                continue
            param, group = params[number]
            try:
                state[param] = import_entry_of(ShardEntry(entry) if cut else entry, param, group)
            except UsageError:  # it is a ValueError, too, and says all
                raise
            except ValueError as error:
                raise ValueError(f"state[{number}]: {error}") from None
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for hook in optimizer_hooks(optimizer, "load_state_dict_post"):
        hook(optimizer)


def match_groups(own: list[Group], saved: list[Group], import_group: Callable[[Group], Group]) -> list[Group]:
    """Loaded groups as they will be: theirs, with our parameters and our way to store things."""
    if len(own) != len(saved):
        raise ValueError(f"param_groups: the loaded state has {len(saved)} groups, the optimizer {len(own)}")
    groups = []
    for index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                f"param_groups[{index}]: the loaded state has {len(theirs['params'])} parameters, the optimizer "
                f"{len(mine['params'])}"
            )
        group = import_group({key: deepcopy(value) for key, value in theirs.items() if key != "params"})
        group["params"] = mine["params"]
        group.update({key: mine[key] for key in _OWN_SETTINGS if key in mine})
        if "param_names" in mine:
            group.setdefault("param_names", mine["param_names"])
        groups.append(group)
    return groups


def import_entry(entry: Mapping[str, Any], param: Tensor, arrays: Mapping[str, str]) -> dict[str, Any]:
    """A parameter's part of a loaded state, checked.

    Raises:
        ValueError: it does not fit the parameter, or lacks an array.
    """
    paged = slot_of(param)
    dtype = param.dtype if param.is_complex() else torch.float32
    shape = own_shape(paged) if paged is not None and isinstance(entry, ShardEntry) else param.shape
    state = import_state(entry, shape, arrays, copy=paged is None, dtype=dtype)
    check_values(state, paged, arrays)
    missing = [key for key in arrays if not isinstance(state.get(key), Tensor)]
    if "step" in state and missing:
        raise ValueError(f"the entry has no {missing[0]}: it is the state of another kind of optimizer")
    if not param.is_floating_point() or param.dtype is torch.float32:
        state.pop("remainder", None)
    return state


def slot_of(param: Tensor) -> ParamHandle | None:
    """The handle of a paged parameter."""
    handle = param.__dict__.get("_slot")
    return handle if isinstance(handle, ParamHandle) else None


def check_values(state: Mapping[str, Any], paged: ParamHandle | None, arrays: Mapping[str, str]) -> None:
    """Have what is going to be loaded into pieces ready, before anything changes."""
    if paged is not None:
        for key, value in state.items():
            check_value(value, paged, key, arrays.get(key, ""))
