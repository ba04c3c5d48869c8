"""One paged tensor: where its bytes lie in a block, and the tensor object that shows them.

While the block is resident the object's data is a view of the arena with its own storage; while it is not, the
data is a *stand-in*: one scalar expanded to the shape, which costs nothing and refuses to be read or written.

[Note: aliases and leases] Two things keep the bytes of a block where they are. A *lease* is a count on the block
(``Block.leases``): our own code takes it with ``acquire`` and gives it back with ``release``. An *alias* is a tensor of
the program's that shares memory with a paged one. Nobody gives an alias back, because nobody had to ask for it::

    row = model.embed.weight[0]      # a view: it shows our memory for as long as `row` lives
    with torch.no_grad():
        row.zero_()                  # no door sees this; the bytes must still be those of the weight

If the block were evicted here, ``row`` would show the bytes of another block, and ``row.zero_()`` would destroy them.
So an alias counts as a lease: before memory is taken away, :meth:`TensorSlot.aliased` asks whether anybody but the
tensor object refers to its storage (see [Note: reference counts] in ``params.reference_counts``). That is why each
tensor shows its bytes through its own storage, although all of a block lie together: the counts then tell of each
one alone.

What follows: a block with an alias is neither evicted nor moved. A block that is discarded while it has one leaves its
memory in limbo, from where it comes back when the alias has gone (:meth:`TensorSlot.alias` is the question to ask).
And because an alias can be written through without a trace (``w.detach().numpy()``), the bytes get a checksum when it
is made, with which they are compared whenever it matters whether the program wrote (``ParamHandle.note_escape``,
``changed``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError
from deepoffload.memory.form import AS_SHOWN, SHARD, Form
from deepoffload.params.cut import Place, TensorCut
from deepoffload.params.ports import PagerPort
from deepoffload.params.reference_counts import LONE, Holding
from deepoffload.params.torch_private import (
    get_data,
    modes_active,
    outside_user_modes,
    refuse_access,
    set_data,
    set_data_elsewhere,
    swap_memory,
)

if TYPE_CHECKING:
    from deepoffload.copies.shown import ShownMemory
    from deepoffload.memory.block import Block


def make_stand_in(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` backed by its own single scalar, which nothing can read or write."""
    with outside_user_modes():
        scalar = torch.zeros((), dtype=dtype, device=device)
        refuse_access(scalar)
        return scalar.expand(shape)


def _nothing() -> None:
    return None


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides to keep: the tensor's own when they cover its memory without holes, else contiguous ones."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)))
    expected = 1
    for dim in order:
        if tensor.size(dim) != 1 and tensor.stride(dim) != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= tensor.size(dim)
    return tuple(tensor.stride())


def _data_unseen(tensor: Tensor) -> Tensor:
    """``tensor.data``, which is nobody's operation."""
    if not modes_active():
        return get_data(tensor)
    with outside_user_modes():
        return get_data(tensor)


class TensorSlot:
    """A paged tensor's place. ``block`` and ``form`` say where its bytes are stored and where they are shown. What the
    program is shown has ``dtype``, ``shape`` and ``stride``, and is on ``device``.

    The tensor object is held weakly: its owner (the module, the user) decides how long it lives. More methods than
    elsewhere, because every way to show, hide, replace or ask for a tensor's bytes is a short one that begins here.

    Attributes:
        cut: how the tensor is cut for several ranks; None where its block stores all of it.
        storage: what the tensor object shows the bytes by, None while it shows the stand-in.
        data_ptr: ``data_ptr()`` of the tensor object then, for those who ask often whether it still shows them.
    """

    __slots__ = (
        "pager",
        "name",
        "block",
        "form",
        "cut",
        "dtype",
        "device",
        "shape",
        "stride",
        "numel",
        "storage",
        "data_ptr",
        "_tensor_ref",
        "_stand_in",
        "_stand_in_storage",
        "__weakref__",
    )

    def __init__(
        self,
        pager: PagerPort,
        name: str,
        tensor: Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
        stride: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.pager = pager
        self.name = name
        self.device = device
        self.block: Block | None = None
        self.form = Form.as_shown(0, 0)
        self.cut: TensorCut | None = None
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.numel = shape.numel()
        self.storage: torch.UntypedStorage | None = None
        self.data_ptr = 0
        self._tensor_ref: weakref.ref[Tensor] | None = None
        self._stand_in = make_stand_in(shape, dtype, device)
        self._stand_in_storage = self._stand_in.untyped_storage()._cdata
        if tensor is not None:
            self.attach(tensor, pager.life.parameter_dropped)

    def attach(self, tensor: Tensor, on_death: Callable[[Any], None] | None = None) -> None:
        """Show the bytes through this tensor object from now on."""
        self._tensor_ref = weakref.ref(tensor, on_death)

    def let_go(self) -> None:
        """Show nothing any more: the tensor object is an ordinary one again."""
        self._tensor_ref = None

    @property
    def unit(self) -> Any:
        """The unit it belongs to, None while there is none. (A separate attribute in a parameter's handle.)"""
        return None

    @property
    def tensor(self) -> Tensor | None:
        return None if self._tensor_ref is None else self._tensor_ref()

    @property
    def reference(self) -> Callable[[], Tensor | None]:
        """Gives the tensor object while it exists."""
        return _nothing if self._tensor_ref is None else self._tensor_ref

    @property
    def stand_in(self) -> Tensor:
        """What the tensor object shows while the bytes are away."""
        return self._stand_in

    @property
    def nbytes(self) -> int:
        """Of what is shown."""
        return self.numel * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def bind(self, block: Block, form: Form) -> None:
        """Say where the bytes lie from now on."""
        self.block = block
        self.form = form
        self.cut = None

    def bind_as_shown(self, block: Block, offset: int) -> None:
        """The same of bytes that are stored as they are shown, from ``offset`` on."""
        self.bind(block, Form.as_shown(offset, self.nbytes))

    def bind_at(self, block: Block, place: Place) -> None:
        """The same of bytes that are stored as they are shown, all or this rank's run of them."""
        if isinstance(place, TensorCut):
            self.bind(block, place.form())
            self.cut = place
        else:
            self.bind_as_shown(block, place)

    def check_stored_as_shown(self, what: str) -> None:
        """Raise ``UnsupportedError`` where the host's bytes are not the elements that the program is shown, all or this
        rank's run of them. ``what``: wants them."""
        if self.form.encoding not in (AS_SHOWN, SHARD):
            raise UnsupportedError(
                f"{self.name} is stored as {self.form.encoding} and shown as {self.dtype}: {what} works on the stored "
                "bytes, and only where they are what is shown. Freeze the parameter (requires_grad_(False)), or let "
                "an optimizer of torch change what is shown"
            )

    def _check_stored_whole(self, what: str) -> None:
        self.check_stored_as_shown(what)
        if self.cut is not None:
            raise UnsupportedError(
                f"{self.name} is cut for several ranks, and this one stores a part of it: {what} works on all stored "
                "bytes. Take a copy of what the tensor shows (clone()), or use one rank"
            )

    def address(self) -> int:
        """Host memory address of the first element. All must be stored as they are shown; the block must be
        resident."""
        if self.block is None:
            raise RuntimeError(f"{self.name} has no block")
        self._check_stored_whole("what takes its address")
        return self.pager.tiers.address(self.block) + self.form.offset_stored

    def element_address(self, start: int) -> int:
        """Host memory address of element ``start``, in the order of memory; those after it follow, as far as this rank
        owns them. They must be stored as they are shown; the block must be resident.

        Raises:
            ValueError: another rank owns the element.
        """
        if self.cut is None or self.block is None:
            return self.address() + start * self.dtype.itemsize
        return self.pager.tiers.address(self.block) + self.cut.shard_offset(start)

    def host_view(self) -> Tensor:
        """A new tensor over the bytes in host memory, which must be stored as they are shown. The block must be
        resident. Call inside :func:`outside_user_modes`."""
        if self.block is None or self.block.offset is None:
            raise RuntimeError(f"{self.name} is not resident")
        self._check_stored_whole("what reads host memory")
        buffer, offset = self.pager.tiers.arena.buffer, self.block.offset + self.form.offset_stored
        return torch.frombuffer(buffer, dtype=self.dtype, count=self.numel, offset=offset).as_strided(
            self.shape, self.stride
        )

    @property
    def memory(self) -> ShownMemory:
        """The memory that the tensor object shows the bytes in."""
        return self.pager.memory_of(self.block)

    def view(self) -> Tensor:
        """A new tensor over the bytes that are shown, with its own storage. Call inside
        :func:`outside_user_modes`, with the block acquired."""
        if self.block is None:
            raise RuntimeError(f"{self.name} has no block")
        flat = self.memory.flat(self.block, self.form.offset_shown, self.dtype, self.numel)
        return flat.as_strided(self.shape, self.stride)

    def install(self) -> None:
        """Show the resident bytes through the tensor object, which shows the stand-in (or what the program put
        there)."""
        tensor = self.tensor
        if tensor is None or self.storage is not None:
            return
        given = get_data(tensor)
        self._show(tensor)
        if given.untyped_storage()._cdata != self._stand_in_storage:
            self._take(given)  # Tensor.set_ has no door: the program has put this in the place of the stand-in

    def _show(self, tensor: Tensor) -> None:
        shown = self.view()
        self.storage = shown.untyped_storage()
        self.data_ptr = shown.data_ptr()
        set_data(tensor, shown)

    def displaced(self) -> bool:
        """True when the program gave the tensor object other memory (``.data =``, ``set_``) where no door saw it."""
        tensor, storage = self.tensor, self.storage
        if tensor is None or storage is None:
            return False
        data = _data_unseen(tensor)
        return data.untyped_storage()._cdata != storage._cdata or data.data_ptr() != self.data_ptr

    def given(self) -> bool:
        """The same while the bytes are not shown: True when it shows something else than the stand-in."""
        tensor = self.tensor
        if tensor is None or self.storage is not None:
            return False
        return _data_unseen(tensor).untyped_storage()._cdata != self._stand_in_storage

    def take_back(self) -> None:
        """Copy what the tensor object shows instead of our memory into our memory, and show that again.

        Raises:
            UnsupportedError: it has another shape or dtype; our memory is shown again, the new values are dropped.
        """
        tensor = self.tensor
        if tensor is None:
            return
        with outside_user_modes():
            given = get_data(tensor)
            views = self._copy_for_views(shown=False)
            self._show_elsewhere(tensor, views)
            self._take(given)

    def take_back_if_set(self, tensor: Tensor) -> None:
        """Before the program looks at the shown bytes: ``Tensor.set_`` has no door, but moves the version."""

    def part_from_views(self) -> None:
        """The bytes are about to be replaced by others, which torch would put into other memory: let views that the
        program holds keep the ones that they show, in separate memory. The bytes must be shown.

        Raises:
            UnsupportedError: this torch has no way to do so; nothing has changed.
        """
        tensor = self.tensor
        if tensor is not None:
            with outside_user_modes():
                views = self._copy_for_views(shown=True)
                if views is not None:
                    self._show_elsewhere(tensor, views)

    def _copy_for_views(self, *, shown: bool) -> torch.UntypedStorage | None:
        """A copy of the bytes for the views of them, None where there is no view. ``shown``: the tensor object shows
        them, too."""
        if self.storage is None or not LONE.storage_is_shared(self, shown=shown):
            return None
        if swap_memory is None:
            raise UnsupportedError(
                f"{self.name}.data = ...: the program holds views of the old values, and torch {torch.__version__} has "
                "no way to let them keep these. clone() what you keep, or use torch 2.12 or newer"
            )
        return self.storage.clone()

    def _show_elsewhere(self, tensor: Tensor, views: torch.UntypedStorage | None) -> None:
        """Show our memory by another storage. Views of the one before get ``views``, and keep the block where it is as
        before: arrays of NumPy and capsules have its address."""
        before = self.storage
        owner: Any = self.block.owner if self.block is not None else None
        if views is not None and owner is not None:
            owner.retired.append(self.alias())
        self.pager.forget_storage(self)
        self._show(tensor)
        self.pager.remember_storage(self)
        if views is not None and before is not None and swap_memory is not None:
            swap_memory(before, views)

    def _take(self, given: Tensor) -> None:
        tensor = self.tensor
        if given.shape != self.shape or given.dtype is not self.dtype:
            raise UnsupportedError(
                f"{self.name} was given data of shape {tuple(given.shape)} and dtype {given.dtype}; a paged parameter "
                f"keeps its own ({tuple(self.shape)}, {self.dtype})"
            )
        if tensor is not None:
            self.pager.will_change(self)
            self.copy_in(given)
            self.taken()

    def shows_the_same(self, values: Tensor) -> bool:
        """Whether ``values`` is a view of all of the bytes that are shown, element by element (``p.data = p.data``)."""
        if type(values) is not Tensor or values.layout is not torch.strided or self.storage is None:
            return False
        same = values.untyped_storage()._cdata == self.storage._cdata and values.stride() == self.stride
        return same and values.data_ptr() == self.data_ptr

    def crc(self) -> int:
        """Checksum of the bytes that are shown."""
        if self.block is None:
            raise RuntimeError(f"{self.name} has no block")
        return self.memory.checksum(self.block, self.form.offset_shown, self.form.nbytes_shown)

    def copy_in(self, values: Tensor) -> None:
        """Overwrite the resident bytes, also with a view of themselves (``p.data = p.data.t()``)."""
        tensor = self.tensor
        if tensor is None:
            return
        if self.memory.holds(values):
            values = values.clone()
        get_data(tensor).copy_(values)

    def taken(self) -> None:
        """The program replaced the values. Overridden where more than the bytes depends on them."""

    def uninstall(self) -> None:
        """Show the stand-in instead."""
        self.storage = None
        tensor = self.tensor
        if tensor is not None:
            set_data(tensor, self._stand_in)

    def aliased(self) -> bool:
        """True when somebody other than the tensor object refers to the memory it shows."""
        if self.storage is None:
            return False
        tensor = self.tensor
        if LONE.storage_is_shared(self, shown=tensor is not None):
            return True
        return tensor is not None and LONE.is_held_natively(tensor)

    def alias(self) -> Callable[[], bool]:
        """Answers, also after :meth:`uninstall`, whether somebody still refers to the memory shown now."""
        if self.storage is None:
            return lambda: False
        holder = Holding(self.storage)
        return lambda: LONE.storage_is_shared(holder, shown=False)

    def restride(self, like: Tensor) -> None:
        """Lay the elements out as those of ``like``, whose values will be copied in. The block must be resident."""
        stride = dense_stride(like)
        if stride != self.stride:
            self.stride = stride
            self.pager.forget_storage(self)
            with outside_user_modes():
                self.uninstall()
                self.install()
            self.pager.remember_storage(self)

    def become(self, value: Tensor) -> None:
        """Take over the dtype, shape and layout of ``value``; the tensor then shows a stand-in of that kind."""
        self.shape = value.shape
        self.numel = value.numel()
        self.stride = dense_stride(value)
        with outside_user_modes():
            self.retype(value.dtype)

    def retype(self, dtype: torch.dtype) -> None:
        """Change the element type (once, when construction ends). The tensor must show its stand-in."""
        self.dtype = dtype
        self._renew_stand_in()

    def move_to(self, device: torch.device) -> None:
        """The tensor is on ``device`` from now on (once, when construction ends). It must show its stand-in, and no
        graph may know it yet."""
        self.device = device
        self._renew_stand_in(set_data_elsewhere)

    def _renew_stand_in(self, show: Callable[[Tensor, Tensor], None] = set_data) -> None:
        self._stand_in = make_stand_in(self.shape, self.dtype, self.device)
        self._stand_in_storage = self._stand_in.untyped_storage()._cdata
        self.storage = None
        tensor = self.tensor
        if tensor is not None:
            show(tensor, self._stand_in)
