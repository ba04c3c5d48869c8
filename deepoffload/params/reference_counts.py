"""Who else refers to memory: it is used again for other bytes only when nobody does.

[Note: reference counts] Whether the program still looks at memory is read from counts that torch and Python keep for
themselves. There are three, and each sees what the others do not. With ``w`` a paged weight whose bytes are shown::

    view = w[0]                      # the use count of the storage (C++)
    storage = w.untyped_storage()    # the reference count of the storage's Python object, of which torch makes one
    capsule = to_dlpack(w)           # the use count of the tensor itself, which the capsule holds

Neither torch nor Python promises what these counts are while one tensor alone uses the memory, and both have changed
them between versions. So no number is written down here. :func:`calibrate` takes each count from a lone object, by the
same code that later asks, when this module is imported; a count above it means that somebody else is there.
:func:`self_test` then holds memory in every way that a program can, lets go of it, and looks whether both are seen. On
a torch or Python where one of them is not, we would overwrite memory that the program looks at: there the import fails
with UnsupportedError, which names what was not seen. Who asks, and what becomes of the answer, is told in [Note:
aliases and leases] in ``params.slot``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import (
    TESTED_VERSIONS,
    get_data,
    held_by_graphs,
    outside_user_modes,
    past_doors,
    requires_grad_of,
    set_data,
    storage_use_count,
    tensor_use_count,
)


class StorageHolder(Protocol):
    """Has a reference to the storage that a tensor object shows, and no other one has been made for it."""

    @property
    def storage(self) -> Any: ...


class TensorHolder(Protocol):
    """Has the only reference to a tensor object that we have."""

    @property
    def shown(self) -> Any: ...


class Holding:
    """Holds a storage for the time after the tensor object has let go of it."""

    __slots__ = ("storage",)

    def __init__(self, storage: Any) -> None:
        self.storage = storage


class _HoldingTensor:
    __slots__ = ("shown",)

    def __init__(self, shown: Tensor) -> None:
        self.shown = shown


def _storage_counts(holder: StorageHolder) -> tuple[int, int]:
    # Both are needed: a view or detach() raises the use count. torch keeps one Python wrapper per storage, so code that
    # collects storages (torch.save) only raises the wrapper's reference count.
    return storage_use_count(holder.storage._cdata), sys.getrefcount(holder.storage)


def _tensor_count(holder: TensorHolder) -> int:
    return sys.getrefcount(holder.shown)


@dataclass(frozen=True)
class LoneCounts:
    """The counts of objects that nobody but the engine, and the tensor object where there is one, refers to.

    Attributes:
        users, references: of a storage while the tensor object shows it.
        users_left, references_left: of a storage after the tensor object has gone, or shows something else.
        native_users: of a frozen tensor object.
        tensor_references: of a tensor object that a holder alone has.
    """

    users: int
    references: int
    users_left: int
    references_left: int
    native_users: int
    tensor_references: int

    def storage_is_shared(self, holder: StorageHolder, *, shown: bool) -> bool:
        """Whether somebody else refers to the memory. ``shown``: the tensor object still shows it."""
        users, references = _storage_counts(holder)
        if shown:
            return users > self.users or references > self.references
        return users > self.users_left or references > self.references_left

    def is_held_natively(self, tensor: Tensor) -> bool:
        """True when native code (``torch.utils.dlpack.to_dlpack``) holds a frozen tensor itself, whose data we would
        change under it. It takes no trainable ones; and graphs from before a tensor was frozen, which hold it too, are
        known."""
        if past_doors(requires_grad_of, (tensor,)):
            return False
        others = int(past_doors(tensor_use_count, (tensor,))) - self.native_users
        return others > 0 and others > held_by_graphs(tensor)

    def tensor_is_shared(self, holder: TensorHolder) -> bool:
        """Whether somebody else has the tensor object that ``holder`` has."""
        return _tensor_count(holder) > self.tensor_references


def _lone() -> tuple[Tensor, Holding]:
    """A tensor object that shows memory as a paged parameter does, and its storage."""
    shown = torch.nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
    set_data(shown, torch.frombuffer(bytearray(64), dtype=torch.float32))
    return shown, Holding(shown.untyped_storage())


def calibrate() -> LoneCounts:
    """Take the counts."""
    with outside_user_modes():
        shown, holder = _lone()
        users, references = _storage_counts(holder)
        native_users = past_doors(tensor_use_count, (shown,))
        set_data(shown, torch.empty(1, dtype=torch.float32))
        left = _storage_counts(holder)
        return LoneCounts(
            users, references, *left, native_users, _tensor_count(_HoldingTensor(torch.empty(1, dtype=torch.float32)))
        )


def self_test(counts: LoneCounts) -> None:
    """Hold memory in every way that a program can, and let go of it: each has to be seen, both times.

    Raises:
        UnsupportedError: one was not seen.
    """
    wrong: list[str] = []

    def expect(seen: bool, whether: bool, what: str) -> None:
        if seen is not whether:
            wrong.append(f"{what}, which {'nothing' if seen else 'something'} else holds")

    with outside_user_modes():
        shown, holder = _lone()
        kept = _HoldingTensor(torch.empty(1, dtype=torch.float32))
        other: Any = None
        for held in (False, True, False):
            other = get_data(shown) if held else None
            expect(counts.storage_is_shared(holder, shown=True), held, "memory that has a view")
            other = shown.untyped_storage() if held else None
            expect(counts.storage_is_shared(holder, shown=True), held, "a storage")
            other = dlpack.to_dlpack(shown) if held else None
            expect(counts.is_held_natively(shown), held, "a tensor that native code may have")
            other = kept.shown if held else None
            expect(counts.tensor_is_shared(kept), held, "a gradient")
        view = get_data(shown)
        set_data(shown, torch.empty(1, dtype=torch.float32))
        expect(counts.storage_is_shared(holder, shown=False), True, "memory that is shown no more and has a view")
        other, view = view.untyped_storage(), torch.empty(1, dtype=torch.float32)
        expect(counts.storage_is_shared(holder, shown=False), True, "a storage that is shown no more")
        del other
        expect(counts.storage_is_shared(holder, shown=False), False, "memory that is shown no more")
    if wrong:
        raise UnsupportedError(
            f"torch {torch.__version__} on Python {sys.version.split()[0]} does not tell who refers to memory: "
            f"{'; '.join(dict.fromkeys(wrong))}. Paged parameters could be overwritten while a program looks at them. "
            f"Use {TESTED_VERSIONS}, or report this version"
        )


LONE = calibrate()
self_test(LONE)
