"""What ``state_dict()`` of a paged model holds: values without bytes, which come while an operation runs.

A ``state_dict()`` of plain PyTorch holds aliases of all weights; of a paged model these would keep all weights in
memory. A :class:`LazyWeight` is an alias, too: it shows later updates of its weight, and what is written to it is
written to the weight. Only its bytes are not held.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import IoFailure, UnsupportedError
from deepoffload.params.metadata import METADATA
from deepoffload.params.torch_private import bare, door_caller, get_data, no_torch_function, version_of
from deepoffload.params.unit import ParamHandle

_GRAPHLESS = frozenset({"copy_", "equal", "clone"})
"""Without a graph to record these may take the parameter itself; nobody gets an alias, and nothing is checksummed."""


class LazyWeight(Tensor):
    """A weight of a paged model as its ``state_dict()`` shows it. Every operation on it is one on the weight."""

    _weight: nn.Parameter
    _mapped: _MappedCopy | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if func in METADATA:
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return _with_bytes(func, args, kwargs or {})

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = self.__dict__.pop("_class")  # see _detach

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save keeps every storage until its end: they are files, not memory.
        return mapped(self).__reduce_ex__(protocol)


def lazy_weight(param: nn.Parameter) -> Tensor:
    """The value of ``param`` in a state dict."""
    slot: ParamHandle = param._slot  # type: ignore[attr-defined]
    with no_torch_function():
        value = slot.stand_in.as_subclass(LazyWeight)
    value._weight = param
    value._mapped = None
    return value


def _with_bytes(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    bare_weight = not torch.is_grad_enabled() and getattr(func, "__name__", "") in _GRAPHLESS
    swapped: dict[int, tuple[Tensor, Tensor]] = {}

    def bring(value: Any) -> Any:
        if type(value) is LazyWeight:
            if id(value) not in swapped:
                weight = value._weight
                swapped[id(value)] = (value, weight if bare_weight else weight.detach())
            return swapped[id(value)][1]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and type(value) in (list, tuple):
            return type(value)(bring(item) for item in value)
        if type(value) is dict:
            return {key: bring(item) for key, item in value.items()}
        return value

    result = func(*bring(args), **bring(kwargs))
    for value, stood_for_it in swapped.values():
        if result is stood_for_it:
            return value  # copy_, contiguous(), cpu(): the tensor itself
    return result


# -- memory with an address --------------------------------------------------------------------------------------------


class _MappedCopy:
    """A copy of a weight in a mapped file without a name, for code that wants an address or a storage.

    Its pages are the page cache's, not the process's: all weights of a model may be mapped at once.
    """

    def __init__(self, handle: ParamHandle, directory: str) -> None:
        self._handle = handle
        self._version: int | None = None
        with tempfile.TemporaryFile(dir=directory, prefix="deepoffload-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, handle.nbytes)  # a full disk shows here, not as SIGBUS
            except OSError as error:
                remedy = "torch.save and safetensors need room for a copy of the weights on nvme_path (else in TMPDIR)"
                raise IoFailure(
                    f"reserving a copy of {handle.name}", error.errno or 0, directory, 0, handle.nbytes, remedy
                ) from error
            memory = mmap.mmap(file.fileno(), handle.nbytes)
        with bare():
            flat = torch.frombuffer(memory, dtype=handle.dtype, count=handle.numel)
            self.tensor = flat.as_strided(handle.shape, handle.stride)

    def refresh(self, weight: nn.Parameter) -> Tensor:
        """The copy, brought up to date."""
        handle = self._handle
        handle.pager.catch_up(handle.unit)
        version = version_of(weight)
        if version != self._version or handle.escape_crc is not None:
            handle.pager.pin(handle)
            try:
                with bare():
                    self.tensor.copy_(get_data(weight))
            finally:
                handle.pager.unpin(handle)
            self._version = version
        return self.tensor


def mapped(value: Tensor) -> Tensor:
    """An ordinary tensor with the values that ``value`` has now. It follows later changes only when asked for again."""
    lazy: Any = value
    weight = lazy._weight
    slot = weight.__dict__["_slot"]
    space = slot.pager.tiers.space
    if space is None and slot.memory.on_host:
        return weight.detach()  # without NVMe all weights are in memory anyway
    directory = str(space.paths[0]) if space is not None else tempfile.gettempdir()
    if lazy._mapped is None:
        known = slot.mapped_copy() if slot.mapped_copy is not None else None  # tied weights have one address
        if known is None:
            known = _MappedCopy(slot, directory)
            slot.mapped_copy = weakref.ref(known)
        lazy._mapped = known
    return lazy._mapped.refresh(weight)


# -- special doors -----------------------------------------------------------------------------------------------------


def _by_address(func: Any, args: Any, kwargs: Any) -> Any:
    return func(mapped(args[0]), *args[1:], **kwargs)


def _get_data(func: Any, args: Any, kwargs: Any) -> Tensor:
    return lazy_weight(args[0]._weight)


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    args[0]._weight.data = args[1]


def _detach(func: Any, args: Any, kwargs: Any) -> Tensor:
    value = args[0]
    if door_caller() is not nn.Parameter.__new__.__code__:
        return lazy_weight(value._weight)
    # nn.Parameter(value), as load_state_dict(assign=True) makes it: a paged parameter of its own. Parameter.__new__
    # insists on the class of its argument, until it sets _is_param.
    made: Any = nn.Parameter(value._weight)
    made.__dict__["_class"] = type(made)
    made.__class__ = LazyWeight
    return made


def _requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    value = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if "_class" in value.__dict__:
        with no_torch_function():
            return func(*args, **kwargs)
    if wanted:
        raise UnsupportedError(
            f"a value of a paged model's state_dict() ({value._weight._slot.name}) takes no gradient; clone() it first"
        )
    return value


def _stride(func: Any, args: Any, kwargs: Any) -> Any:
    stride = args[0]._weight.__dict__["_slot"].stride
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(stride) if dim is None else stride[dim]


def _storage_offset(func: Any, args: Any, kwargs: Any) -> int:
    return 0


def _is_contiguous(func: Any, args: Any, kwargs: Any) -> bool:
    slot = args[0]._weight.__dict__["_slot"]
    with bare():
        like = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="meta")
        return like.is_contiguous(*args[1:], **kwargs)


def _special() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    tensor: Any = Tensor
    return {
        tensor.data.__get__: _get_data,
        tensor.data.__set__: _set_data,
        tensor.requires_grad.__set__: _requires_grad,
        Tensor.requires_grad_: _requires_grad,
        Tensor.detach: _detach,
        Tensor.stride: _stride,
        Tensor.storage_offset: _storage_offset,
        Tensor.is_contiguous: _is_contiguous,
        Tensor.data_ptr: _by_address,
        Tensor.untyped_storage: _by_address,
        Tensor.storage: _by_address,
        Tensor._typed_storage: _by_address,
    }


_SPECIAL = _special()
