"""State of other shapes than its parameter, and lists of tensors: one after the other, as bytes, in arrays.

A piece of state knows arrays of the parameter's shape alone. So the bytes of all other tensors of a parameter's state
are cut into so many arrays (``packed[0]``, ``packed[1]``, ...) as they need; the last one is filled up. Pieces,
checkpoints, placement and loading then need to know nothing of them. For example, a matrix of 64 x 32 with a
preconditioner of 64 x 64 and one of 32 x 32 has 20480 bytes of them in three arrays of 8192 bytes.

Where a packed tensor was, ``optimizer.state`` has a *label*, which says what it is and where its bytes begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepoffload.native.aio import round_up
from deepoffload.params.layout import ALIGNMENT_BYTES

_PREFIX = "packed["
_LABEL = "deepoffload.packed"

Path = tuple[str | int, ...]
"""The key of an entry, and the indices in lists that lead to a tensor."""


class Packed(NamedTuple):
    """A tensor of a parameter's state that is packed.

    Attributes:
        start_bytes: where it begins, if all arrays are laid one after the other.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_bytes: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_packed_key(key: object) -> bool:
    """Whether it is the key of an array of packed state."""
    return isinstance(key, str) and key.startswith(_PREFIX)


def packed_key(number: int) -> str:
    """The key of an array of packed state."""
    return f"{_PREFIX}{number}]"


def packed_keys(packed: Sequence[Packed], numel: int) -> tuple[str, ...]:
    """The arrays that these tensors need, of ``numel`` fp32 elements each."""
    total_bytes = max((each.start_bytes + each.nbytes for each in packed), default=0)
    return tuple(packed_key(number) for number in range(-(-total_bytes // max(1, numel * 4))))


def lay_out(tensors: Mapping[Path, Tensor]) -> tuple[Packed, ...]:
    """Where tensors go; each begins aligned, as memory of torch's allocator does, so that kernels do the same."""
    found, start_bytes = [], 0
    for path in sorted(tensors, key=repr):
        tensor = tensors[path]
        found.append(Packed(path, tuple(tensor.shape), tensor.dtype, start_bytes))
        start_bytes = round_up(start_bytes + tensor.nbytes, ALIGNMENT_BYTES)
    return tuple(found)


def tensors_in(key: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """The tensors of an entry, also those in lists, with their paths; labels count as tensors."""
    if isinstance(value, Tensor) or is_label(value):
        yield (key,), value
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            for (_, *rest), found in tensors_in(key, each):
                yield (key, index, *rest), found


def outline(value: Any) -> Any:
    """What stays the same of a list or tuple from step to step: how long it is, and which tensors are where."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), str(value.dtype))
    if is_label(value):
        return (tuple(value["shape"]), f"torch.{value['dtype']}")
    return (type(value).__name__, *map(outline, value)) if isinstance(value, (list, tuple)) else None


def is_label(value: Any) -> bool:
    """Whether a value stands for a packed tensor."""
    return isinstance(value, dict) and value.get("kind") == _LABEL


Moves = list[tuple[Tensor, Tensor]]
"""What is copied, and where to."""


def pack(state: Mapping[str, Any], packed: Sequence[Packed], room: Tensor) -> tuple[dict[str, Any], Moves]:
    """The entries with labels in the places of packed tensors, and where these go in ``room`` (uint8).

    A tensor keeps its stride if that leaves no gaps: some kernels compute otherwise with a transposed matrix.
    """
    places = {each.path: each for each in packed}
    moves: Moves = []

    def labelled(path: Path, value: Any) -> Any:
        place = places.get(path)
        if place is None:
            return value
        stride = _dense_stride(value)
        moves.append((value, _view(room, place, stride)))
        dtype = str(place.dtype).removeprefix("torch.")
        return {
            "kind": _LABEL,
            "dtype": dtype,
            "shape": list(place.shape),
            "stride": list(stride),
            "start_bytes": place.start_bytes,
        }

    found = {key: replaced((key,), value, labelled) for key, value in state.items()}
    return found, moves


def unpacked(entry: Mapping[str, Any], show: Callable[[Path, Packed, tuple[int, ...]], Tensor]) -> dict[str, Any]:
    """An entry with tensors in the places of labels, in new lists.

    Args:
        show: a tensor, given its path, place and stride.
    """

    def shown(path: Path, value: Any) -> Any:
        if not is_label(value):
            return value
        place = Packed(path, tuple(value["shape"]), getattr(torch, value["dtype"]), value["start_bytes"])
        return show(path, place, tuple(value["stride"]))

    return {key: replaced((key,), value, shown) for key, value in entry.items()}


def views_of(entry: Mapping[str, Any], packed: Sequence[Packed], room: Tensor) -> dict[str, Any]:
    """An entry with views of ``room`` in the places of labels. What was loaded, and is still to be packed, is copied:
    it is the program's."""
    paths = {each.path for each in packed}

    def shown(path: Path, value: Any) -> Any:
        if path in paths and isinstance(value, Tensor):
            return value.to(room.device, copy=True)
        return value

    views = unpacked(entry, lambda path, place, stride: _view(room, place, stride))
    return {key: replaced((key,), value, shown) for key, value in views.items()} if _waits(entry, paths) else views


def _waits(entry: Mapping[str, Any], paths: Set[Path]) -> bool:
    found = (each for key, value in entry.items() for each in tensors_in(key, value))
    return any(path in paths and not is_label(value) for path, value in found)


def has_labels(entry: Mapping[str, Any]) -> bool:
    """Whether tensors of an entry are packed."""
    return any(is_label(value) for key in entry for _, value in tensors_in(key, entry[key]))


def without_arrays(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as the class itself has it, of one that has the arrays of its packed state, too: flat, in the order of
    the parameter's memory."""
    keys = sorted(filter(is_packed_key, entry), key=lambda key: int(key[len(_PREFIX) : -1]))
    if not keys:
        return dict(entry)
    room = torch.cat([entry[key].detach().view(torch.uint8) for key in keys])
    return unpacked(
        {key: value for key, value in entry.items() if not is_packed_key(key)},
        lambda path, place, stride: _view(room, place, stride).clone(),
    )


def copy_all(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values to their targets, as if all at once: a step may have exchanged tensors of its state."""
    moves = [(value, target) for value, target in moves if not _is_same_memory(value, target)]
    targets = {target.untyped_storage().data_ptr() for _, target in moves}
    ready = [
        (value.clone() if value.untyped_storage().data_ptr() in targets else value, target) for value, target in moves
    ]
    for value, target in ready:
        target.copy_(value)


def _is_same_memory(value: Tensor, target: Tensor) -> bool:
    return value.data_ptr() == target.data_ptr() and value.device == target.device and value.stride() == target.stride()


def replaced(path: Path, value: Any, by: Callable[[Path, Any], Any]) -> Any:
    """A value with others in the places of what is in it; lists and tuples are new ones."""
    if isinstance(value, (list, tuple)):
        items = [replaced((*path, index), each, by) for index, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return by(path, value)


def _view(room: Tensor, place: Packed, stride: Sequence[int]) -> Tensor:
    flat = room[place.start_bytes : place.start_bytes + place.nbytes].view(place.dtype)
    return flat.as_strided(place.shape, stride)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Its stride, or that of a contiguous copy where there are gaps or elements share memory."""
    return tuple(torch.empty_like(tensor, device="meta").stride())
