"""Kernel calls on fake tensors, remembered: torch takes 50 us to work out what one gives, and layers repeat them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from deepoffload.estimate.fake_maker import FakeMaker
from deepoffload.estimate.recording import Op
from deepoffload.params.torch_private import fake_device, tree_flatten, tree_map

_ATTENTION_BACKWARD = 2.5
"""Matrix products in the backward of fused attention for one pair in its forward: five for two (FlashAttention,
arXiv 2205.14135, algorithm 4)."""

_ELSEWHERE = (torch.ops.aten.as_strided.default,)
"""Views whose place does not depend on where their argument lies in its storage."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What one tensor that a call gives is like. ``of_first``: it lies in the storage of the first argument, so many
    elements (``offset``) behind it; ``is_first``: it is the first argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    of_first: bool
    is_first: bool
    offset: int


@dataclass(frozen=True, slots=True)
class _KnownCall:
    """``many``: the sort of the sequence that a call gives its tensors in; None: it gives one. ``absent``: where in it
    there is no tensor, but None. ``op``: None for views, which compute nothing."""

    results: tuple[_Made, ...]
    many: type | None
    absent: tuple[int, ...]
    op: Op | None

    def given(self, made: list[Tensor]) -> Any:
        """These tensors in the way that the call gives them."""
        if self.many is None:
            return made[0]
        every: list[Tensor | None] = list(made)
        for place in self.absent:
            every.insert(place, None)
        return self.many(every)


class KnownCalls:
    """What calls give, for all runs of one model: their tensors are others, what they are like is the same."""

    def __init__(self) -> None:
        self.calls: dict[object, _KnownCall] = {}
        self.ops: dict[object, Op] = {}


class Kernels:
    """Runs kernels on fake tensors. What a call gives depends on its arguments without their values, so it is worked
    out once for the same ones."""

    def __init__(self, maker: FakeMaker, known: KnownCalls | None = None) -> None:
        known = known or KnownCalls()
        self._maker = maker
        self._known = known.calls
        self._ops = known.ops
        self._on_meta: dict[int, tuple[Tensor, Tensor]] = {}  # with the program's: so its id stays its own

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor], Op | None]:
        """What the call gives, the tensors in that, and what has been computed (None: nothing)."""
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        key = self._key(func, args, kwargs)
        if key is None:
            args, kwargs = tree_map(self._placed, (args, kwargs))
            key = self._key(func, args, kwargs)
        known = self._known.get(key) if key is not None else None
        if known is None:
            out, made, op, known = self._ask(func, args, kwargs, may_be_known=key is not None)
            if known is None:
                return out, made, op
            self._known[key] = known
        # The first one, too: torch refers weakly to tensors that it makes itself, and then nobody can swap them.
        made = [self._again(result, args) for result in known.results]
        return known.given(made), made, known.op

    def _placed(self, value: Any) -> Any:
        """A tensor of the program's on the meta device has a shape, as those here have, which seem to be on a CPU."""
        if not isinstance(value, Tensor) or self._maker.is_fake(value) or not value.is_meta:
            return value
        if id(value) not in self._on_meta:
            made = self._maker.fake(value.shape, value.stride(), value.dtype, torch.device("cpu"), None, 0)
            self._on_meta[id(value)] = value, made
        return self._on_meta[id(value)][1]

    def _ask(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_be_known: bool
    ) -> tuple[Any, list[Tensor], Op | None, _KnownCall | None]:
        """What torch gives, as :meth:`call`, and how to give it again (None: that is not known)."""
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out, [], None, None
        made = [out] if isinstance(out, Tensor) else [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        op = self._op(func, args, kwargs, out, made) if made and not func.is_view else None
        results = [self._result(tensor, args) for tensor in made] if may_be_known and made else []
        several = () if isinstance(out, Tensor) or type(out) not in (tuple, list) else out
        absent = tuple(place for place, each in enumerate(several) if each is None)
        is_plain = isinstance(out, Tensor) or (bool(several) and len(made) + len(absent) == len(several))
        fresh = [t.untyped_storage()._cdata for t, r in zip(made, results, strict=False) if r and not r.of_first]
        if not (results and all(results) and is_plain and len(fresh) == len(set(fresh))):
            return out, made, op, None
        many = None if isinstance(out, Tensor) else type(out)
        return out, made, op, _KnownCall(tuple(filter(None, results)), many, absent, op)

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Everything that the result depends on; None where that cannot be said."""
        if func in _ELSEWHERE:
            return None
        found: list[object] = [func, torch.get_default_dtype()]
        try:
            return tuple(found) if self._said(found, args) and self._said(found, kwargs.items()) else None
        except TypeError:  # an argument that cannot be hashed
            return None

    def _said(self, found: list[object], values: Any) -> bool:
        for value in values:
            if isinstance(value, Tensor):
                if not self._maker.is_fake(value):
                    return False
                found += (value.shape, value.stride(), value.dtype, fake_device(value))
            elif isinstance(value, (list, tuple)):
                found += (type(value), len(value))
                if not self._said(found, value):
                    return False
            else:
                hash(value)
                found += (type(value), value)  # 1 and 1.0 are equal
        return True

    def _result(self, tensor: Tensor, args: tuple[Any, ...]) -> _Made | None:
        """None for a tensor that :meth:`_again` would not make so."""
        if not self._maker.is_fake(tensor) or tensor.layout is not torch.strided or tensor.requires_grad:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        storage, first = tensor.untyped_storage(), args[0] if args and isinstance(args[0], Tensor) else None
        of_first = first is not None and first.untyped_storage()._cdata == storage._cdata
        offset = int(tensor.storage_offset())
        if of_first and first is not None:
            offset -= int(first.storage_offset())
        elif offset or storage.nbytes() != _span_bytes(tensor):
            return None
        elif any(each.untyped_storage()._cdata == storage._cdata for each in _tensors_in(args, {})):
            return None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _Made(shape, stride, tensor.dtype, fake_device(tensor), of_first, tensor is first, offset)

    def _again(self, result: _Made, args: tuple[Any, ...]) -> Any:
        if result.is_first:
            return args[0]
        base = args[0] if result.of_first else None
        offset = result.offset if base is None else base.storage_offset() + result.offset
        return self._maker.fake(result.shape, result.stride, result.dtype, result.device, base, offset)

    def _op(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, made: list[Tensor]) -> Op:
        taken = list(_tensors_in(args, kwargs))
        flops = _flops(func, args, kwargs, out)
        key = func, flops, tuple((t.shape, t.stride(), t.dtype) for t in (*taken, *made)), len(taken)
        op = self._ops.get(key)
        if op is None:
            tensors = tuple((tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in taken)
            nbytes = sum(_dense_bytes(t) for t in (*taken, *made))
            op = self._ops[key] = Op(str(func), tensors, flops, nbytes)
        return op


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (each for each in arg if isinstance(each, Tensor))


def _span_bytes(tensor: Tensor) -> int:
    """What ``torch.empty_strided`` takes for such a tensor."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _dense_bytes(tensor: Tensor) -> int:
    """Bytes that a pass over the tensor touches; an expanded dimension is one element."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * tensor.element_size()


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    if "attention_for_cpu" in packet.__name__:
        first = 1 if "backward" in packet.__name__ else 0  # the gradient of the output comes before query and key
        query, key = args[first], args[first + 1]
        batch, heads, length, width = query.shape
        forward = 4 * batch * heads * length * key.shape[2] * width
        return int(forward * _ATTENTION_BACKWARD) if first else int(forward)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
