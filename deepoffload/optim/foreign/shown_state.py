"""The state of paged parameters in the layout of its class: what ``state_dict()`` shows, and what is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.optim.foreign.packed import Packed, Path, has_labels, packed_key, replaced, unpacked
from deepoffload.optim.foreign.state_form import StateForm, described, form_after
from deepoffload.optim.paged_state import ArrayCopy, copy_arrays
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.state_dict import check_values
from deepoffload.optim.state_values import CopyRoom, PagedSource, ValueForm
from deepoffload.params.pager import Pager
from deepoffload.params.state_dict_values import LazyValue, lazy_value, mapped
from deepoffload.params.torch_private import version_of
from deepoffload.params.unit import ParamHandle

_LEADS = tuple(MASTER_PART_KEYS.values())


class _PackedSource(PagedSource):
    """A tensor of a parameter's state that is packed."""

    __slots__ = ("_start_bytes",)

    def __init__(
        self, param: nn.Parameter, handle: ParamHandle, path: Path, place: Packed, form: ValueForm, copies: CopyRoom
    ) -> None:
        name = str(path[0]) + "".join(f"[{index}]" for index in path[1:])
        super().__init__(param, handle, name, "", copies, weakref.WeakSet(), form)
        self._start_bytes = place.start_bytes

    def is_own(self, handle: ParamHandle, key: str, field: str) -> bool:
        return False

    def _copy_to(self, targets: Mapping[tuple[str, str], Tensor]) -> int:
        self.check()
        pager: Any = self.handle.pager
        (target,) = targets.values()
        pager.catch_up(self.handle.unit)
        version = version_of(self._param)
        array_bytes, nbytes = self.handle.numel * 4, target.numel() * target.element_size()
        if nbytes:
            first, last = self._start_bytes // array_bytes, (self._start_bytes + nbytes - 1) // array_bytes
            arrays = torch.empty(last - first + 1, self.handle.numel, dtype=torch.float32, device="cpu")
            keys = [packed_key(number) for number in range(first, last + 1)]
            copy_arrays(pager, self.handle, {key: ArrayCopy(key, row) for key, row in zip(keys, arrays, strict=True)})
            begin = self._start_bytes - first * array_bytes
            values = arrays.view(-1).view(torch.uint8)[begin : begin + nbytes].view(target.dtype)
            target.as_strided((target.numel(),), (1,)).copy_(values)
        return version


def with_values(entry: Mapping[str, Any], param: nn.Parameter, handle: ParamHandle, copies: CopyRoom) -> dict[str, Any]:
    """An entry with values in the places of labels, as the class itself has it."""

    def show(path: Path, place: Packed, stride: tuple[int, ...]) -> Tensor:
        form = ValueForm(torch.Size(place.shape), place.dtype, stride)
        return lazy_value(_PackedSource(param, handle, path, place, form, copies))

    return unpacked(entry, show)


def show_packed(state: dict[Any, Any], handles: Mapping[Any, ParamHandle]) -> None:
    """Replace entries of paged parameters whose state is packed."""
    rooms: dict[int, CopyRoom] = {}
    for param, handle in handles.items():
        entry = state.get(param, {})
        if has_labels(entry) and isinstance(handle.pager, Pager):
            copies = rooms.setdefault(id(handle.pager), CopyRoom(handle.pager))
            state[param] = with_values(entry, param, handle, copies)


def imported(
    entry: Mapping[str, Any], param: Tensor, handle: ParamHandle | None, form: StateForm, name: str
) -> dict[str, Any]:
    """A parameter's part of a loaded state; numbers stay what they are. What belongs into pieces is not copied.

    Args:
        name: of the class.

    Raises:
        ValueError: shapes or names are not those of the class.
    """
    packed = {each.path for each in form.packed} if handle is not None else set()
    state: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Tensor) and (key in form.arrays or key in _LEADS):
            if value.shape != param.shape:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
            state[key] = value.detach() if handle is not None else value.detach().to(torch.float32, copy=True)
        else:
            state[key] = replaced((key,), value, lambda path, each: _own(each, is_copied_later=path in packed))
    check_values(state, handle, {key: key for key in form.arrays})
    kept = {key: value for key, value in state.items() if key not in _LEADS}
    if kept and kept.keys() != {*form.arrays, *form.others}:
        raise ValueError(
            f"it has {sorted(kept)}, and {name} keeps {sorted((*form.arrays, *form.others))}: it is the state of "
            "another kind of optimizer"
        )
    others = form_after({key: kept[key] for key in form.others}, param.shape, name) if kept else form
    if (others.packed, dict(others.outlines)) != (form.packed, dict(form.outlines)):
        raise ValueError(f"it has {described(others)}, and {name} keeps {described(form)}: shapes differ")
    if param.dtype is torch.float32:
        state.pop("remainder", None)
    return state


def _own(value: Any, *, is_copied_later: bool) -> Any:
    if type(value) is LazyValue:
        return mapped(value) if is_copied_later else value.clone()
    if isinstance(value, Tensor):
        return value.detach() if is_copied_later else value.detach().clone()
    return deepcopy(value)
