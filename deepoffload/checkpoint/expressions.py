"""Tensors that are described but not computed: what becomes of parameters on their way into a file.

Transformers packs weights in memory differently from how checkpoints store them, and has functions that turn one form
into the other for a whole state dict at once. Run on *meta* tensors under a recorder, the same functions say what each
stored tensor is made of, and then every stored tensor can be read from its parameters piece by piece: no copy of a
parameter is ever whole in memory, except where an operation cannot be followed through.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import TorchDispatchMode, tree_flatten, tree_map_only

Opener = Callable[[], AbstractContextManager[Tensor]]
"""Gives the bytes of a source for as long as the context lasts."""

_COPIES = (torch.ops.aten.clone.default,)
_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)


@dataclass(frozen=True)
class _TensorSource:
    """A storage that stands for a real tensor."""

    base: Tensor
    open: Opener


@dataclass(frozen=True)
class _Result:
    """A storage that an operation has made; ``index`` says which of its outputs."""

    base: Tensor
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int


class Part(NamedTuple):
    """Elements ``start`` to ``stop``, in row-major order, of a view of a source."""

    source: _TensorSource
    view: Tensor
    start: int
    stop: int

    @property
    def offset_numel(self) -> int:
        """Where the view begins in its source, in elements of its memory."""
        return int(self.view.storage_offset() - self.source.base.storage_offset())

    def of(self, real: Tensor) -> Tensor:
        """The same view of a real tensor with the geometry of the source."""
        return _real_view(real, self.source.base, self.view)

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """The real view."""
        with self.source.open() as real:
            yield self.of(real)


class Expressions(TorchDispatchMode):
    """Records what is done to stand-ins made by :meth:`source` while it is entered, and reads the outcome in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, _TensorSource | _Result] = {}

    # -- recording -------------------------------------------------------------------------------------------------

    def source(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, opener: Opener) -> Tensor:
        """A meta tensor that stands for a real one of this geometry."""
        base = torch.empty_strided(tuple(shape), stride, dtype=dtype, device="meta")
        self._origins[_key(base)] = _TensorSource(base, opener)
        return base

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise UnsupportedError(f"{func} changes a weight in place while it is converted for saving")
        result = func(*args, **kwargs)
        for index, out in enumerate(_tensors(result)):
            if out.device.type != "meta":
                continue  # small helpers, such as an index tensor
            if _key(out) not in self._origins:
                self._origins[_key(out)] = _Result(out, func, tuple(args), kwargs, index)
        return result

    # -- reading ---------------------------------------------------------------------------------------------------

    def pieces(self, tensor: Tensor, window_bytes: int) -> Iterator[Tensor]:
        """The values of ``tensor`` in row-major order, as contiguous tensors of at most ``window_bytes``.

        A piece is valid until the next one is asked for. Call outside the recording.
        """
        window = max(1, window_bytes // tensor.element_size())
        return self._stream(tensor, 0, tensor.numel(), window)

    def parts(self, tensor: Tensor) -> Iterator[Part]:
        """The views of sources that ``tensor`` consists of, in its row-major order.

        Raises:
            UnsupportedError: it is computed from them in a way that cannot be undone.
        """
        for part in self._parts(tensor, 0, tensor.numel()):
            origin = self._origins[_key(part[0])]
            if isinstance(origin, _Result):
                raise UnsupportedError(f"a stored tensor is the result of {origin.function}, which cannot be undone")
            yield Part(origin, *part)

    def _stream(self, tensor: Tensor, start: int, stop: int, window: int) -> Iterator[Tensor]:
        """Elements ``start`` to ``stop`` of the row-major order of ``tensor``."""
        for part, first, last in self._parts(tensor, start, stop):
            yield from self._slabs(part, first, last, window)

    def _slabs(self, part: Tensor, start: int, stop: int, window: int) -> Iterator[Tensor]:
        """The same of one that is opened. In a separate generator, so that what it holds goes before the next one is
        opened, which may need the room."""
        with self._opened(part) as values:
            for view in slabs(values, start, stop, window):
                yield view.contiguous().view(-1)

    def _parts(self, tensor: Tensor, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """The same elements as runs of tensors that are neither copies nor joins of others."""
        origin = self._origins[_key(tensor)]
        if isinstance(origin, _Result) and tensor.is_contiguous() and origin.base.is_contiguous():
            offset = int(tensor.storage_offset())
            if origin.function in _COPIES and origin.args[0].device.type == "meta":
                yield from self._parts(origin.args[0], start + offset, stop + offset)
                return
            if origin.function in _JOINS and _dim_of(origin) == 0:
                yield from self._joined(origin.args[0], start + offset, stop + offset)
                return
        yield tensor, start, stop

    def _joined(self, parts: list[Tensor], start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        ends = list(itertools.accumulate(part.numel() for part in parts))
        for index in range(bisect.bisect_right(ends, start), len(parts)):
            before = ends[index] - parts[index].numel()
            if before >= stop:
                return
            yield from self._parts(parts[index], max(start - before, 0), min(stop, ends[index]) - before)

    @contextmanager
    def _opened(self, tensor: Tensor) -> Iterator[Tensor]:
        with ExitStack() as stack:
            yield self._value(tensor, stack)

    def _value(self, tensor: Tensor, stack: ExitStack) -> Tensor:
        """The values behind a stand-in: a view of its source's bytes, or an operation's outcome, computed whole."""
        origin = self._origins[_key(tensor)]
        if isinstance(origin, _TensorSource):
            real = stack.enter_context(origin.open())
        else:
            args, kwargs = tree_map_only(Tensor, lambda t: self._argument(t, stack), (origin.args, origin.kwargs))
            real = _tensors(origin.function(*args, **kwargs))[origin.index]
            if real.stride() != origin.base.stride():
                real = torch.empty_strided(
                    real.shape, origin.base.stride(), dtype=real.dtype, device=real.device
                ).copy_(real)
        return _real_view(real, origin.base, tensor)

    def _argument(self, tensor: Tensor, stack: ExitStack) -> Tensor:
        return self._value(tensor, stack) if tensor.device.type == "meta" else tensor


def _key(tensor: Tensor) -> int:
    # A storage lives as long as its origin is kept, so its address is unique.
    return tensor.untyped_storage()._cdata


def _tensors(result: Any) -> list[Tensor]:
    return [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]


def _dim_of(origin: _Result) -> int:
    return int(origin.kwargs.get("dim", origin.args[1] if len(origin.args) > 1 else 0))


def _real_view(real: Tensor, base: Tensor, view: Tensor) -> Tensor:
    """What ``view`` is to ``base``, of ``real``."""
    offset = real.storage_offset() + view.storage_offset() - base.storage_offset()
    return real.as_strided(view.shape, view.stride(), offset)


def slabs(tensor: Tensor, start: int, stop: int, window: int) -> Iterator[Tensor]:
    """Views of at most ``window`` elements that, each in row-major order, are elements ``start`` to ``stop``."""
    if start >= stop:
        return
    if tensor.is_contiguous() or tensor.dim() == 1:
        flat = tensor.view(-1) if tensor.dim() != 1 else tensor
        for at in range(start, stop, window):
            yield flat[at : min(at + window, stop)]
        return
    if start == 0 and stop == tensor.numel() <= window:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    at = start
    while at < stop:
        index, inside = divmod(at, row)
        if inside == 0 and row <= window and stop - at >= row:
            rows = min(window // row, (stop - at) // row)
            yield tensor[index : index + rows]
            at += rows * row
        else:
            end = min(stop, (index + 1) * row)
            yield from slabs(tensor[index], inside, end - index * row, window)
            at = end
