"""What ``optimizer.state_dict()`` shows of state that is not in ordinary fp32 tensors: values without bytes.

[Note: values of optimizer state] In plain PyTorch a state dict shares the optimizer's memory: it shows later steps. A
value here does, too, and so does the step count, so what one reads of a state dict is always of one step. The
bytes come when somebody asks: for the time of an operation, and for good in a mapped file without a name where an
address is asked for. They are a copy. What is written to it is the program's own from then on, shows no later steps,
and reaches the optimizer by ``load_state_dict``. (A weight's value passes writes on. Of state, ``torch``'s optimizers
take over what they are given and write to it, and distributed checkpoints load remainders in any order with the
weights that they complete.) When the state is no more what a value showed, because another was loaded or another
optimizer took over, reading it is an error.
"""

from __future__ import annotations

import abc
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.errors import UsageError
from deepoffload.optim.handles import gradients_of
from deepoffload.optim.ordinary import plain_array
from deepoffload.optim.paged_state import ArrayCopy, Arrays, copy_arrays, pieces_of, with_own_master
from deepoffload.optim.rank_gradients import shared_state_of
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.state_shards import own_elements, own_shape
from deepoffload.params.pager import Pager
from deepoffload.params.slot import make_stand_in
from deepoffload.params.state_dict_values import LazyValue, lazy_value, mapped, source_of
from deepoffload.params.torch_private import outside_user_modes, version_of
from deepoffload.params.unit import ParamHandle
from deepoffload.params.value_source import ValueSource, View, view_of

_CPU = torch.device("cpu")
_REMEDY = (
    "torch.save and safetensors need room for a copy of the optimizer's state where the swap files are (else in TMPDIR)"
)


class _CopySource(ValueSource):
    """Its values are a copy, which is brought up to date when somebody asks. See [Note: values of optimizer state]."""

    __slots__ = ("_copy", "_version", "_asked", "_written")

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...]) -> None:
        super().__init__(name, stride, make_stand_in(shape, dtype, _CPU))
        self._copy: Tensor | None = None
        self._version = 0
        self._asked = False
        self._written = False

    @abc.abstractmethod
    def _room(self) -> Tensor:
        """Where the copy is."""

    @abc.abstractmethod
    def _is_fresh(self) -> bool:
        """Whether what the copy shows has not changed."""

    @abc.abstractmethod
    def _fill(self, target: Tensor) -> None:
        """Copy what it shows to ``target``, which lies as the source says."""

    def mapped(self) -> Tensor:
        self._asked = True
        return self._shown()

    def operand(self, view: View, *, bare: bool, escapes: bool) -> Tensor:
        self._asked |= escapes
        return view_of(self._shown(), self, view)

    def used(self) -> None:
        if self._copy is None or self._written:
            return
        if version_of(self._copy) != self._version:
            self._written = True
        elif not self._asked:
            self._copy = None

    def clone(self) -> Tensor:
        with outside_user_modes():
            target = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_CPU)
            if self._written:
                target.copy_(self._shown())
            else:
                self._fill(target)
        return target

    def _shown(self) -> Tensor:
        with outside_user_modes():
            if self._copy is not None and not self._is_stale():
                return self._copy
            copy = self._room() if self._copy is None else self._copy
            self._fill(copy)
        self._copy, self._version = copy, version_of(copy)
        return copy

    def _is_stale(self) -> bool:
        """Whether there is no copy, or one that shows what was."""
        return self._copy is None or not (self._written or self._is_fresh())


class ValueForm(NamedTuple):
    """What a value looks like."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]


class PagedSource(_CopySource):
    """An array of a paged parameter's state.

    Args:
        field: of the pieces; "" for what completes the weight to its master.
        together: the sources of this state dict that lie in the same pieces.
        form: of the values; not said: the parameter's, fp32.
        own: only the elements that this rank owns, as a flat tensor in the order of the weight's memory.
    """

    __slots__ = ("_param", "handle", "array", "_owner", "_copies", "_place", "_weight_version", "_together", "_own")

    def __init__(
        self,
        param: nn.Parameter,
        handle: ParamHandle,
        key: str,
        field: str,
        copies: CopyRoom,
        together: weakref.WeakSet[PagedSource],
        form: ValueForm | None = None,
        *,
        own: bool = False,
    ) -> None:
        dtype = torch.int16 if key == "remainder" else torch.float32
        self._own = own_elements(handle) if own else None
        if self._own is not None:
            form = ValueForm(own_shape(handle), dtype, (1,))
        form = ValueForm(handle.shape, dtype, tuple(handle.stride)) if form is None else form
        super().__init__(f"{key} of {handle.name}", form.shape, form.dtype, form.stride)
        self._param = param
        self.handle = handle
        self.array = (key, field)
        self._owner = handle.state_owner
        self._copies = copies
        self._place = copies.add(self.numel * form.dtype.itemsize)
        self._weight_version = -1
        self._together = together
        together.add(self)

    def mapped(self) -> Tensor:
        """The copies of all arrays of the parameter are made in one pass: who asks for one address (``torch.save``,
        safetensors) asks for the others next, and pieces that do not fit into memory would be read for each again."""
        if self._is_stale():
            others = [each for each in self._together if each is not self and each._is_stale()]
            looked_at = self.handle.escape_crc is not None  # the copies would be made for each again
            self._fill_all([self] if looked_at else [self, *others])
        return super().mapped()

    def check(self) -> None:
        """Raise where the pieces do not hold what it is of any more.

        Raises:
            ClosedError, UsageError.
        """
        gradients_of(self.handle.pager, self.handle.name)
        if self.handle.state_owner is not self._owner:
            raise UsageError(
                f"{self.name}: this value of optimizer.state_dict() showed a state that is no more: another one was "
                "loaded, another optimizer has taken over, or the first step was taken since; call state_dict() again, "
                "and keep what it shows now with copy.deepcopy(optimizer.state_dict())"
            )

    def is_own(self, handle: ParamHandle, key: str, field: str) -> bool:
        """Whether it shows this very array, so that there is nothing to load: nobody has its address to write to."""
        mine = self.handle is handle and self.array == (key, field)
        return mine and not self._written and not self._asked

    def _room(self) -> Tensor:
        memory = self._copies.memory(self._place, self.name)
        if memory is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_CPU)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.numel)
        return flat.as_strided(self.shape, self.stride)

    def _is_fresh(self) -> bool:
        self.check()
        self.handle.pager.catch_up(self.handle.unit)
        # An update moves the weight's counter, and so does a write to the weight, after which it is its own master.
        return version_of(self._param) == self._weight_version and self.handle.escape_crc is None

    def _fill(self, target: Tensor) -> None:
        self._weight_version = self._copy_to({self.array: target})

    def _fill_all(self, sources: Sequence[PagedSource]) -> None:
        """Make their copies, or bring them up to date, with one look at the pieces."""
        with outside_user_modes():
            copies = [each._room() if each._copy is None else each._copy for each in sources]
            version = self._copy_to({each.array: copy for each, copy in zip(sources, copies, strict=True)})
        for each, copy in zip(sources, copies, strict=True):
            each._copy, each._version, each._weight_version = copy, version_of(copy), version

    def _copy_to(self, targets: Mapping[tuple[str, str], Tensor]) -> int:
        """Copy arrays of the parameter; the version of the weight to which they belong."""
        pager: Any = self.handle.pager
        self.check()
        pager.catch_up(self.handle.unit)
        version = version_of(self._param)
        copies = {key: ArrayCopy(field, copy) for (key, field), copy in targets.items()}
        shared = shared_state_of(pager)
        if shared is None or self._own is not None:
            copy_arrays(pager, self.handle, copies, self._own)
        else:
            shared.copy_arrays(self.handle, copies)
        return version


class _InitialSource(PagedSource):
    """An array before the first step."""

    __slots__ = ("_value",)

    def __init__(
        self, param: nn.Parameter, handle: ParamHandle, key: str, value: float, copies: CopyRoom, *, own: bool
    ) -> None:
        super().__init__(param, handle, key, "", copies, weakref.WeakSet(), own=own)
        self._value = value

    def mapped(self) -> Tensor:
        return _CopySource.mapped(self)

    def is_own(self, handle: ParamHandle, key: str, field: str) -> bool:
        return False

    def _fill(self, target: Tensor) -> None:
        self.check()
        target.fill_(self._value)
        self._weight_version = version_of(self._param)


class CopyRoom:
    """Room on the disk for the copies of one state dict; it takes none before somebody asks for bytes."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._sizes_bytes: list[int] = []
        self._places: list[Any] | None = None

    def add(self, nbytes: int) -> int:
        """The number of a new place."""
        self._sizes_bytes.append(nbytes)
        return len(self._sizes_bytes) - 1

    def memory(self, number: int, name: str) -> memoryview | None:
        """A mapped place; None for less than a page, which is better in memory.

        Raises:
            IoFailure: the disk is full.
        """
        if self._sizes_bytes[number] < mmap.PAGESIZE:
            return None
        copies = self._pager.mapped_copies
        with self._pager.lock:
            copies.give_room_back()
            if self._places is None:
                self._places = copies.places(self._sizes_bytes, name, _REMEDY)
            return copies.memory(self._places[number], self._pager.lock, name, _REMEDY)


class _EntrySource(_CopySource):
    """A tensor of ``optimizer.state[param]`` that changes its place or (``is_coded``) is stored in another type."""

    __slots__ = ("_entry", "_key", "_is_coded")

    def __init__(self, entry: Mapping[str, Any], key: str, is_coded: bool) -> None:
        now = plain_array(entry, key, like=True) if is_coded else entry[key]
        super().__init__(key, now.shape, now.dtype, now.stride())
        self._entry = entry
        self._key = key
        self._is_coded = is_coded

    def _room(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_CPU)

    def _is_fresh(self) -> bool:
        return False

    def _fill(self, target: Tensor) -> None:
        if self._key not in self._entry:
            raise UsageError(f"{self._key}: the optimizer does not keep this array any more; call state_dict() again")
        target.copy_(plain_array(self._entry, self._key) if self._is_coded else self._entry[self._key])


def entry_value(entry: Mapping[str, Any], key: str, *, is_coded: bool = True) -> Tensor:
    """The value of a tensor that an entry of ``optimizer.state`` holds in memory.

    Args:
        is_coded: bf16 and 8-bit ones stand for fp32 values. Those of another package's class are what they are.
    """
    return lazy_value(_EntrySource(entry, key, is_coded))


def paged_values(
    pager: Pager,
    params: Mapping[ParamHandle, Any],
    held: Mapping[ParamHandle, Arrays],
    initial: Callable[[Tensor], Mapping[str, float]],
    *,
    own: bool = False,
) -> dict[ParamHandle, dict[str, Tensor]]:
    """Values of what the pieces hold, for parameters of which they hold anything.

    Args:
        params: parameters of the optimizer.
        held: those of which steps were taken, with their arrays. All that the others can have is a remainder that is
            not all zero, or a master that is not the weight's value.
        initial: what their arrays hold before the first step, by key.
        own: with several ranks, only the elements that this one owns.
    """
    copies = CopyRoom(pager)
    shared, others = shared_state_of(pager), params.keys() - held.keys()
    leads = with_own_master(pager, others) if shared is None else shared.with_own_master(others)
    found: dict[ParamHandle, dict[str, Tensor]] = {handle: {} for handle in params if handle in held or handle in leads}
    for handle in [handle for handle in found if handle not in held]:
        for key, value in initial(params[handle]).items():
            found[handle][key] = lazy_value(_InitialSource(params[handle], handle, key, value, copies, own=own))
    by_param: dict[ParamHandle, weakref.WeakSet[PagedSource]] = {}
    arrays = _arrays_here(pager, found, held) if shared is None else shared.arrays(found.keys(), held)
    for handle, present in arrays:
        together = by_param.setdefault(handle, weakref.WeakSet())
        for key, field in present.items():
            if key not in found[handle]:
                source = PagedSource(params[handle], handle, key, field, copies, together, own=own)
                found[handle][key] = lazy_value(source)
    return found


def _arrays_here(
    pager: Pager, found: Mapping[ParamHandle, Any], held: Mapping[ParamHandle, Arrays]
) -> Iterator[tuple[ParamHandle, dict[str, str]]]:
    """The arrays that each piece has of each parameter in ``found``, and what completes its weight: the fields by their
    keys."""
    for piece, parts in pieces_of(pager, found.keys()):
        for handle in dict.fromkeys(piece.handles[part.tensor] for part in parts):
            present = {key: field for key, field in held.get(handle, {}).items() if field in piece.format.fields}
            lead = MASTER_PART_KEYS.get(piece.kind)
            if lead == "remainder" or (lead == "master" and not handle.master_stale):
                present[lead] = ""
            yield handle, present


def check_value(value: object, handle: ParamHandle, key: str, field: str) -> None:
    """Have a value that is going to be loaded into pieces ready, before anything changes.

    Raises:
        UsageError: what it showed is no more. IoFailure: there is no room for a copy of it.
    """
    source = source_of(value)
    if isinstance(source, PagedSource) and source.is_own(handle, key, field):
        source.check()
    elif type(value) is LazyValue:
        mapped(value)  # it may be of a piece that loading changes


def ready_value(value: Tensor, handle: ParamHandle, key: str, field: str) -> Tensor | None:
    """The ordinary tensor of a value that is loaded; None where it is what the pieces hold already."""
    source = source_of(value)
    if isinstance(source, PagedSource) and source.is_own(handle, key, field):
        return None
    return mapped(value) if type(value) is LazyValue else value
