"""What ``state_dict()`` of paged models and optimizers holds: values without bytes, which come while an operation runs.

A ``state_dict()`` of plain PyTorch holds aliases of all weights; of a paged model these would keep all weights in
memory. A :class:`LazyValue` of a weight is an alias, too: it shows later updates of its weight, and what is written to
it is written to the weight. Only its bytes are not held. Views of it are such values, too, so that the address of a
view and the address of the whole agree. What a value is of, and what writing to it means, is its source's to know: a
weight here, optimizer state in :mod:`deepoffload.optim.state_values`.

[Note: a value becomes a parameter] ``load_state_dict(state, assign=True)`` makes ``nn.Parameter(value)`` of every
value, and what comes out has to be a paged parameter, no LazyValue. ``nn.Parameter.__new__`` has no place for that.
It does::

    t = value.detach()            # our door knows the caller: a new paged parameter, with LazyValue for its class
    t.requires_grad_(flag)        # let through, because ``t`` has ``_class``
    if type(t) is not type(value): raise RuntimeError(...)
    t._is_param = True            # the last that happens to ``t``: our setter gives it its real class, ``_class``

So ``LazyValue._is_param`` is a property whose setter swaps the class of its object. Nothing but ``nn.Parameter`` sets
it. ``isinstance(value, nn.Parameter)`` reads it, and gets False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.mapped import MappedCopy
from deepoffload.params.metadata import METADATA, layout_answers
from deepoffload.params.slot import make_stand_in
from deepoffload.params.torch_private import PARAMETER_NEW, door_caller, outside_user_modes, past_doors, set_data
from deepoffload.params.unit import ParamHandle
from deepoffload.params.value_source import ValueSource, View, view_of

_GRAPHLESS = frozenset({"copy_", "equal", "clone"})
"""Without a graph to record these may take the parameter itself; nobody gets an alias, and nothing is checksummed."""

_ESCAPES = frozenset({"numpy", "__array__", "__dlpack__", "share_memory_"})
"""These hand out memory that may be written to without a trace."""

_VIEWING = frozenset(
    (
        "view view_as reshape reshape_as flatten ravel unflatten as_strided expand expand_as broadcast_to t transpose "
        "swapaxes swapdims permute movedim moveaxis adjoint squeeze unsqueeze narrow select unfold diagonal chunk "
        "split split_with_sizes tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split unbind contiguous "
        "__getitem__"
    ).split()
)
"""Functions whose result may be a view of their first argument."""


class LazyValue(Tensor):
    """A weight of a paged model, or an array of an optimizer's state, as ``state_dict()`` shows it, or a view of one.
    Every operation on it is one on what it is of."""

    _source: ValueSource
    _view: View
    _class: type

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """Empty: what copies a value with its attributes (torch's stager of checkpoints) is not to copy ours."""
        return {}

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if func in METADATA:
            return past_doors(func, args, kwargs)
        if _may_be_view(func, args):
            shown = _viewed(func, args, kwargs or {})
            if shown is not None:
                return shown
        return _with_bytes(func, args, kwargs or {})

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        kind = self._class  # see [Note: a value becomes a parameter]
        del self._class
        self.__class__ = kind

    def __copy__(self) -> Tensor:
        return _value(self._source, self._view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            source = self._source
            if id(source.key) not in memo:  # views of one weight, and tied ones, have one memory in the copy, too
                memo[id(source.key)] = source.clone()
            memo[id(self)] = view_of(memo[id(source.key)], source, self._view)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save keeps every storage until its end: they are files, not memory.
        return mapped(self).__reduce_ex__(protocol)


class _WeightSource(ValueSource):
    """The weight that a value and its views are of, with its address once somebody has asked for it."""

    __slots__ = ("weight", "slot", "copy")

    def __init__(self, weight: nn.Parameter) -> None:
        slot: ParamHandle = weight.__dict__["_slot"]
        super().__init__(slot.name, slot.stride, slot.stand_in)
        self.weight = weight
        self.slot = slot
        self.copy: MappedCopy | None = None

    @property
    def key(self) -> object:
        return self.slot

    def mapped(self) -> Tensor:
        """It follows later changes of the weight only when asked for again."""
        pager, slot = self.slot.pager, self.slot
        if pager.tiers.space is None and slot.memory.on_host:
            return self.weight.detach()  # without NVMe all weights are in memory anyway
        if self.copy is None:
            with pager.lock:
                self.copy = pager.mapped_copies.of(slot)  # tied weights have one address
        return self.copy.refresh(self.weight)

    def operand(self, view: View, *, bare: bool, escapes: bool) -> Tensor:
        weight = self.weight if bare and view == self.whole() else self.weight.detach()
        return view_of(weight, self, view)

    def clone(self) -> Tensor:
        return lazy_value(self).clone()

    def parameter(self, value: Tensor, view: View) -> nn.Parameter:
        return nn.Parameter(self.weight) if view == self.whole() else super().parameter(value, view)


def lazy_value(source: ValueSource) -> Tensor:
    """The value of all of ``source``."""
    return _value(source, source.whole())


def lazy_weight(param: nn.Parameter) -> Tensor:
    """The value of ``param`` in a state dict."""
    return lazy_value(_WeightSource(param))


def is_weight_itself(value: Any, slot: object) -> bool:
    """Whether ``value`` is a state dict's value of all of this weight."""
    if type(value) is not LazyValue or not isinstance(value._source, _WeightSource):
        return False
    return value._source.slot is slot and value._view == value._source.whole()


def source_of(value: Any) -> ValueSource | None:
    """What a value shows all of; None for everything else."""
    return value._source if type(value) is LazyValue and value._view == value._source.whole() else None


def mapped(value: Tensor) -> Tensor:
    """An ordinary tensor with the values that ``value`` has now, always at the same address."""
    lazy: Any = value
    return view_of(lazy._source.mapped(), lazy._source, lazy._view)


def _value(source: ValueSource, view: View) -> Tensor:
    stand_in = source.stand_in
    if view.shape != source.shape or view.dtype is not source.dtype:
        stand_in = make_stand_in(view.shape, view.dtype, stand_in.device)
    value: LazyValue = past_doors(Tensor.as_subclass, (stand_in, LazyValue))
    value._source = source
    value._view = view
    return value


# -- operations --------------------------------------------------------------------------------------------------------


def _may_be_view(func: Any, args: Any) -> bool:
    if not args or type(args[0]) is not LazyValue:
        return False
    if func in _VIEWING_ATTRIBUTES:
        return True
    name = getattr(func, "__name__", "")
    return name in _VIEWING and (name != "__getitem__" or _is_basic(args[1]))


def _is_basic(index: Any) -> bool:
    """Whether indexing makes a view: other than with lists and tensors."""
    return all(
        each is None or each is Ellipsis or type(each) is int or type(each) is slice
        for each in (index if type(index) is tuple else (index,))
    )


def _viewed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a viewing function gives, without bytes; None where it gives a copy."""
    value = args[0]
    source = value._source
    with outside_user_modes():
        whole = torch.empty_strided(source.shape, source.stride, dtype=source.dtype, device="meta")
        shape = view_of(whole, source, value._view)
        result = func(shape, *args[1:], **kwargs)
        if result is shape:
            return value
        parts = result if isinstance(result, (list, tuple)) else (result,)
        if any(part.untyped_storage()._cdata != whole.untyped_storage()._cdata for part in parts):
            return None
    values = [_value(source, View(part.shape, part.dtype, part.stride(), part.storage_offset())) for part in parts]
    return type(result)(values) if isinstance(result, (list, tuple)) else values[0]


def _with_bytes(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    bare, escapes = not torch.is_grad_enabled() and name in _GRAPHLESS, name in _ESCAPES
    swapped: dict[int, tuple[Tensor, Tensor]] = {}

    def bring(value: Any) -> Any:
        if type(value) is LazyValue:
            if id(value) not in swapped:
                swapped[id(value)] = (value, value._source.operand(value._view, bare=bare, escapes=escapes))
            return swapped[id(value)][1]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and type(value) in (list, tuple):
            return type(value)(bring(item) for item in value)
        if type(value) is dict:
            return {key: bring(item) for key, item in value.items()}
        return value

    try:
        result = func(*bring(args), **bring(kwargs))
    finally:
        for lazy, _ in swapped.values():
            lazy._source.used()  # type: ignore[attr-defined]
    for value, stood_for_it in swapped.values():
        if result is stood_for_it:
            return value  # copy_, contiguous(), cpu(): the tensor itself
    return result


# -- special doors -----------------------------------------------------------------------------------------------------


def _by_address(func: Any, args: Any, kwargs: Any) -> Any:
    return func(mapped(args[0]), *args[1:], **kwargs)


def _get_data(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _value(args[0]._source, args[0]._view)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """The value shows something else from now on, as an ordinary tensor; the weight stays what it is."""
    value = args[0]
    del value._source, value._view
    value.__class__ = Tensor
    set_data(value, args[1])


def _detach(func: Any, args: Any, kwargs: Any) -> Tensor:
    value = args[0]
    if door_caller() is not PARAMETER_NEW:
        return _value(value._source, value._view)
    made: Any = value._source.parameter(value, value._view)  # see [Note: a value becomes a parameter]
    made.__dict__["_class"] = type(made)
    made.__class__ = LazyValue
    return made


def _requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    value = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if hasattr(value, "_class"):
        return past_doors(func, args, kwargs)
    if wanted:
        name = value._source.name
        raise UnsupportedError(f"a value of a state_dict() ({name}) takes no gradient; clone() it first")
    return value


def _special() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    tensor: Any = Tensor
    return {
        tensor.data.__get__: _get_data,
        tensor.data.__set__: _set_data,
        tensor.requires_grad.__set__: _requires_grad,
        Tensor.requires_grad_: _requires_grad,
        Tensor.detach: _detach,
        **layout_answers(lambda value: value._view, lambda value: value._view.offset),
        Tensor.data_ptr: _by_address,
        Tensor.untyped_storage: _by_address,
        Tensor.storage: _by_address,
        Tensor._typed_storage: _by_address,
    }


_SPECIAL = _special()

_VIEWING_ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH") if hasattr(Tensor, name)
)
"""Attributes that are views."""
