"""The forward door: the classes whose ``__torch_function__`` brings the bytes a call takes.

``OffloadedParameter`` is the class that an adopted ``nn.Parameter`` gets; ``OffloadedGradient`` shows a gradient that
landed in a unit's gradient block. Both keep one attribute, ``_slot``. Correctness rests on this door alone: module
hooks only make it cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD
from deepoffload.params import differentiation
from deepoffload.params.callables import BY_ELEMENT, UNASKED, with_open_doors
from deepoffload.params.copies import ordinary_parameter, page_in_context, plain_copy
from deepoffload.params.edits import after_edit, before_edit, written_by
from deepoffload.params.inference import is_leaf, requires_grad
from deepoffload.params.metadata import LAYOUT, METADATA
from deepoffload.params.moved_model import MOVES, of_moved_model
from deepoffload.params.new_data import set_new_data
from deepoffload.params.peer_names import PeerNames
from deepoffload.params.rows import look_up
from deepoffload.params.sharding import refuse_sharding
from deepoffload.params.slot import TensorSlot
from deepoffload.params.state_dict_values import is_weight_itself, lazy_weight
from deepoffload.params.tensor_lists import calls_of_one
from deepoffload.params.torch_compiler import NOT_CAPTURED, leave_to_python
from deepoffload.params.torch_private import (
    MODULE_SAVE,
    PARAMETER_NEW,
    Operators,
    door_caller,
    get_data,
    make_dual,
    past_doors,
    refuse_tracing,
    set_data,
    set_grad,
    unscale_and_check,
    version_of,
)
from deepoffload.params.unit import ParamHandle

_RAW_GRAD: Any = Tensor.grad

_ESCAPES = frozenset(
    (
        "detach numpy data_ptr untyped_storage storage _typed_storage __dlpack__ __array__ __cuda_array_interface__ "
        "share_memory_"
    ).split()
)


class OffloadedParameter(PeerNames, nn.Parameter):
    """A parameter whose bytes come and go. Never constructed by users: ``nn.Parameter`` objects become one in place."""

    _slot: ParamHandle

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True, *, _slot: Any = None) -> Any:  # noqa: PYI034
        # type(p)(tensor, ..., **p.__dict__) as accelerate and peft write it: an ordinary parameter, adopted on arrival.
        return ordinary_parameter(data, requires_grad, with_attributes=_slot is not None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return through_the_door(func, types, args, kwargs or {})

    # The door below sees these, too. Going through it costs as much as the rest of a gradient's way.

    @property
    def grad(self) -> Tensor | None:
        return _get_grad(_RAW_GRAD.__get__, (self,), {})

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        gradients = self._slot.pager.gradients
        if gradients is None:
            set_grad(self, value)
        else:
            gradients.assign(self._slot, value)

    @grad.deleter
    def grad(self) -> None:
        _assign_grad(_RAW_GRAD.__delete__, (self,), {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.set_``, native code that asks no class, and wants the address of the bytes that are shown before."""
        slot = self._slot
        with SHIELD:
            slot.pager.pin(slot)
            try:
                past_doors(super().set_, args, kwargs)
                slot.take_back_if_set(self)
            finally:
                slot.pager.unpin(slot)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = copy = plain_copy(self)
            memo[id(self)] = page_in_context(copy, self._slot.name, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_copy(self).__reduce_ex__(protocol)


class OffloadedGradient(Tensor):
    """A landed gradient, as ``param.grad`` shows it. Operations on it work on the gradient block itself."""

    _slot: TensorSlot

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return through_the_door(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


PAGED_CLASSES = (OffloadedParameter, OffloadedGradient)
_KNOWN_CLASSES = (*PAGED_CLASSES, nn.Parameter, Tensor)


def through_the_door(func: Callable[..., Any], types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` with every paged tensor among its arguments resident."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if func in METADATA:
        return past_doors(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name.startswith(("_foreach_", "_fused_")) or func is unscale_and_check:
        return _one_by_one(func, args, kwargs)
    return _paged_call(func, name, types, args, kwargs)


leave_to_python(through_the_door, NOT_CAPTURED)


def _paged_call(func: Callable[..., Any], name: str, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
    with SHIELD:  # what is pinned is unpinned, and what is pushed popped
        return _with_bytes(func, name, types, args, kwargs)


def _with_bytes(func: Callable[..., Any], name: str, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
    refuse_tracing()
    paged: list[Any] = []
    _collect(args, paged)
    if kwargs:
        _collect(kwargs.values(), paged)
    pinned: list[TensorSlot] = []
    try:
        for tensor in paged:  # before anything is pinned: a unit's update needs room
            tensor._slot.pager.catch_up(tensor._slot.unit)
        together: Any = [tensor._slot for tensor in paged] if len(paged) > 1 else ()
        for tensor in paged:
            slot: TensorSlot = tensor._slot
            slot.pager.note_use(slot)
            slot.pager.pin(slot, together)
            pinned.append(slot)
            slot.take_back_if_set(tensor)
        changed = _before_mutation(name, args, kwargs)
        pager = paged[0]._slot.pager if paged else None
        pushed: bool | None = False
        if pager is not None and torch.is_grad_enabled():
            pushed = pager.hooks.push(always=any(type(tensor) is OffloadedGradient for tensor in paged))
        if pushed is None:
            for slot in pinned:
                slot.pager.hold_until_step(slot)
        try:
            if type(func) in Operators or func in BY_ELEMENT or any(t not in _KNOWN_CLASSES for t in types):
                result = _looking_plain(func, args, kwargs, paged)
            else:
                result = past_doors(func, args, kwargs)
        finally:
            if pushed and pager is not None:
                pager.hooks.pop()
        for tensor in paged:
            _after_call(tensor, name, any(tensor is one for one in changed))
        for tensor in changed:
            after_edit(tensor._slot)
        return of_moved_model(paged[0], result) if name in MOVES else result
    finally:
        for slot in pinned:
            slot.pager.unpin(slot)
        if pinned and pinned[0].pager.evict_always:
            pinned[0].pager.pump()


def _collect(values: Any, found: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is OffloadedParameter or kind is OffloadedGradient:
            if not any(value is seen for seen in found):
                found.append(value)
        elif kind is list or kind is tuple or (isinstance(value, (list, tuple)) and not isinstance(value, torch.Size)):
            _collect(value, found)
        elif kind is dict:
            _collect(value.values(), found)


def _before_mutation(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that the call will change."""
    targets: list[Any] = []
    _collect(written_by(name, args, kwargs), targets)
    for tensor in targets:
        before_edit(tensor._slot)
        tensor._slot.pager.will_change(tensor._slot)
        if type(tensor) is OffloadedParameter:
            tensor._slot.master_stale = True
        else:
            tensor._slot.taken()
    return targets


def _after_call(tensor: Any, name: str, was_known: bool) -> None:
    """``was_known``: the call was expected to change it."""
    slot = tensor._slot
    if type(tensor) is OffloadedGradient:
        version = version_of(tensor)
        if slot.aliased():
            slot.escaped = True  # a view, through which the program may write at any time
        if version != slot.version or slot.escaped or name in _ESCAPES:
            slot.version = version
            slot.pager.will_change(slot)
            slot.taken()
        return
    version = version_of(tensor)
    if version != slot.version:
        slot.version = version
        slot.master_stale = True
        slot.pager.will_change(slot)
        if not was_known and slot.is_shared():
            slot.uncompared = slot.crc()
    if name in _ESCAPES or slot.aliased():
        slot.note_escape()  # what was handed out can be written to without moving any version (detach().numpy())


def _looking_plain(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], paged: list[Any]) -> Any:
    """Call with our tensors looking like plain ones: another library's tensor subclass among the arguments is asked,
    and other paged tensors that the program uses inside come to their doors."""
    classes = [type(tensor) for tensor in paged]
    try:
        for tensor in paged:
            tensor.__class__ = nn.Parameter if type(tensor) is OffloadedParameter else Tensor
        return SHIELD.let_through(func, args, kwargs)  # the program's code may take long
    finally:
        for tensor, kind in zip(paged, classes, strict=True):
            tensor.__class__ = kind


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A ``_foreach_`` or ``_fused_`` function, tensor by tensor."""
    name = getattr(func, "__name__", "")
    calls = calls_of_one(args, kwargs)
    if calls is None:
        return _paged_call(func, name, (), args, kwargs)
    results: list[Any] = []
    for one, named in calls:
        paged: list[Any] = []
        _collect(one, paged)
        _collect(named.values(), paged)
        result = _paged_call(func, name, (), one, named) if paged else func(*one, **named)
        if isinstance(result, (list, tuple)):
            results.extend(result)
    return results if results else None


# -- special doors -----------------------------------------------------------------------------------------------------


def _get_grad(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if type(tensor) is not OffloadedParameter or tensor._slot.pager.gradients is None:
        return past_doors(func, args)
    return tensor._slot.pager.gradients.read(tensor._slot)


def _assign_grad(func: Any, args: Any, kwargs: Any) -> None:
    tensor, value = args[0], (args[1] if len(args) > 1 else None)
    if type(tensor) is not OffloadedParameter or tensor._slot.pager.gradients is None:
        past_doors(func, args)
    else:
        tensor._slot.pager.gradients.assign(tensor._slot, value)


def _get_data(func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor = args[0]
    slot = tensor._slot
    refuse_sharding(slot.name)
    with SHIELD:
        slot.pager.pin(slot)
        try:
            slot.take_back_if_set(tensor)
            shown = get_data(tensor)
            if type(tensor) is OffloadedParameter:
                slot.note_escape()
            else:
                slot.escaped = True
                slot.pager.will_change(slot)
                slot.taken()
            return shown if type(shown) is Tensor else shown.as_subclass(Tensor)
        finally:
            slot.pager.unpin(slot)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    set_new_data(*args)


def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    caller = door_caller()
    if caller is MODULE_SAVE and type(args[0]) is OffloadedParameter:
        if args[0]._slot.unit is not None and args[0]._slot.pager.life.closed_because is None:
            return lazy_weight(args[0])
    refuse_sharding(args[0]._slot.name)
    if caller is PARAMETER_NEW:
        # nn.Parameter(paged) insists on getting its own class back: give it a new parameter of that class.
        return _new_parameter_like(args[0])
    return _paged_call(func, "detach", (), args, kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[1] if len(args) > 1 else kwargs.get("src")
    if type(args[0]) is OffloadedParameter and is_weight_itself(source, args[0]._slot):
        return args[0]  # a state dict that was loaded in place: the weight has its values and keeps its exact master
    return _paged_call(func, "copy_", (type(args[0]), type(source)), args, kwargs)


def _make_dual(func: Any, args: Any, kwargs: Any) -> Any:
    primal, tangent, *rest = args
    return _paged_call(func, "_make_dual", (), (primal, differentiation.given_as_views(tangent), *rest), kwargs)


def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    if type(args[0]) in PAGED_CLASSES:
        refuse_sharding(args[0]._slot.name)
    return _paged_call(func, "view_as", (), args, kwargs)


def _is_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    refuse_sharding(args[0]._slot.name)
    return LAYOUT[Tensor.is_contiguous](func, args, kwargs)


def _new_parameter_like(tensor: Any) -> Any:
    slot = tensor._slot
    copy = plain_copy(tensor) if type(tensor) is OffloadedParameter else nn.Parameter(tensor.clone())
    if slot.pager.adopt_late(copy, f"{slot.name} (copy)") is None:
        raise UnsupportedError(
            f"nn.Parameter({slot.name}) could not be adopted; use nn.Parameter({slot.name}.data.clone())"
        )
    return copy


def _dlpack(func: Any, args: Any, kwargs: Any) -> Any:
    """The capsule holds the tensor it was made of, not its storage: make it of an alias, which we see."""
    tensor = args[0]
    if tensor.requires_grad and type(tensor) is OffloadedParameter:
        return past_doors(func, args, kwargs)  # torch's own refusal
    return func(_get_data(None, args[:1], {}), *args[1:], **kwargs)


def _detach_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``grad.detach_()``: a landed gradient has no graph. (torch takes what we show for a view, which it refuses.)"""
    if type(args[0]) is OffloadedGradient:
        return args[0]
    return _paged_call(func, "detach_", (), args, kwargs)


def _share_memory(func: Any, args: Any, kwargs: Any) -> Any:
    raise UnsupportedError(
        f"{args[0]._slot.name}.share_memory_(): a paged parameter's bytes come and go, other processes cannot share "
        "them; share a copy (copy.deepcopy(model))"
    )


def _repr(func: Any, args: Any, kwargs: Any) -> str:
    slot = args[0]._slot
    if slot.pager.life.closed_because is not None:
        return f"<{type(args[0]).__name__} {slot.name} {tuple(slot.shape)} {slot.dtype}, of a closed engine>"
    return str(_paged_call(func, "__repr__", (), args, kwargs))


def _special() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    tensor: Any = Tensor
    table: dict[Any, Callable[[Any, Any, Any], Any]] = {
        tensor.grad.__get__: _get_grad,
        tensor.grad.__set__: _assign_grad,
        tensor.grad.__delete__: _assign_grad,
        tensor.data.__get__: _get_data,
        tensor.data.__set__: _set_data,
        tensor.dtype.__get__: differentiation.dtype,
        tensor.is_leaf.__get__: is_leaf,
        tensor.requires_grad.__set__: requires_grad,
        Tensor.size: differentiation.size,
        make_dual: _make_dual,
        Tensor.requires_grad_: requires_grad,
        Tensor.copy_: _copy,
        Tensor.detach: _detach,
        Tensor.detach_: _detach_in_place,
        Tensor.share_memory_: _share_memory,
        Tensor.__dlpack__: _dlpack,
        **LAYOUT,
        torch.nn.functional.embedding: look_up(_paged_call),
        Tensor.view_as: _view_as,
        Tensor.is_contiguous: _is_contiguous,
        Tensor.__repr__: _repr,
        Tensor.backward: differentiation.backward,
        torch.autograd.backward: differentiation.backward,
        torch.autograd.grad: differentiation.grad,
        **dict.fromkeys(UNASKED, with_open_doors),
    }
    return table


_SPECIAL = _special()


def show_stand_in(tensor: Any, slot: TensorSlot, kind: type) -> None:
    """Give ``tensor`` its paged class and its slot, and its stand-in for data."""
    tensor.__class__ = kind
    tensor._slot = slot
    slot.uninstall()


def plain_again(tensor: Any, value: Tensor | None) -> None:
    """Undo the adoption: the class is ``nn.Parameter`` again, with ``value`` for data when given."""
    tensor.__class__ = nn.Parameter
    tensor.__dict__.pop("_slot", None)
    if value is not None:
        set_data(tensor, value)
