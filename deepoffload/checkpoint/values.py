"""Python values as JSON that gives back the same types: what a ``state_dict()`` or a program's own state holds.

JSON has no tuples, bytes, NaN, or keys that are numbers. Such a value becomes an object ``{"$": kind, ...}``. Tensors
and numpy's arrays go into a safetensors file; the JSON has their names. Nothing that is read can name code, so nothing
can be called.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepoffload.checkpoint.safetensors_file import DTYPE_NAMES
from deepoffload.errors import UnsupportedError, UsageError

DEPTH_MAX = 64
"""Containers inside containers."""

_PLACE_END = 80

INT_BITS_MAX = 8192
"""Python reads no integers of more than 4300 digits from text."""

_MAPPINGS: Mapping[type, str] = {dict: "dict", OrderedDict: "ordered dict", Counter: "counter"}
_NUMPY_KINDS = "biufc"
"""Booleans and numbers; others may hold objects."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """What ``json`` can write of ``value``.

    Args:
        where: what the value is called in errors, and the beginning of the names of its tensors.
        tensors: takes the tensors in ``value`` under the names by which the result refers to them.

    Raises:
        UnsupportedError: something in it is neither number (also numpy's), string, bytes, None, list, tuple, dict (also
            ordered, or a Counter), ``argparse.Namespace``, array nor tensor. The message names its key.
    """
    return _encode(value, where, tensors, 0)


def _encode(value: Any, where: str, tensors: dict[str, Tensor], depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return _checked_int(value, where)
    if kind is str:
        return _checked_text(value, where)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is bytes:
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if kind is Tensor:
        return _encode_tensor(value, where, tensors)
    if (kind is np.ndarray or issubclass(kind, np.generic)) and value.dtype.kind in _NUMPY_KINDS:
        return _encode_array(np.asarray(value), kind is not np.ndarray, where, tensors)
    if depth >= DEPTH_MAX:
        raise UnsupportedError(
            f"{_place(where)} is a {kind.__name__} inside of {depth} other containers, and a checkpoint holds values "
            f"in at most {DEPTH_MAX}: write it flatter, or leave it out (does it contain itself?)"
        )
    if kind in (list, tuple):
        items = [_encode(item, f"{where}[{index}]", tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"$": "tuple", "items": items}
    if kind in _MAPPINGS:
        if kind is dict and all(type(key) is str for key in value) and "$" not in value:
            return {
                _checked_text(key, f"the key {key!r} of {where}"): _encode(
                    item, f"{where}[{key!r}]", tensors, depth + 1
                )
                for key, item in value.items()
            }
        pairs = []
        for key, item in value.items():
            if type(key) not in (str, int, float, bool, bytes, tuple, type(None)):
                raise _unsupported(f"the key {key!r} of {where}", key)
            encoded = _encode(key, f"the key {key!r} of {where}", tensors, depth + 1)
            pairs.append([encoded, _encode(item, f"{where}[{key!r}]", tensors, depth + 1)])
        return {"$": _MAPPINGS[kind], "items": pairs}
    if kind is Namespace:
        return {"$": "namespace", "items": _encode(vars(value), where, tensors, depth + 1)}
    raise _unsupported(where, value)


def _encode_array(value: np.ndarray[Any, Any], is_number: bool, where: str, tensors: dict[str, Tensor]) -> Any:
    """numpy's types are not all torch's, so a file has the bytes."""
    held = np.frombuffer(bytearray(value.tobytes()), np.uint8) if value.size else np.empty(0, np.uint8)
    content = _encode_tensor(torch.from_numpy(held), where, tensors)
    kind = "numpy number" if is_number else "array"
    return {"$": kind, "dtype": value.dtype.str, "shape": list(value.shape), "bytes": content}


def _place(where: str) -> str:
    """``where`` for an error: of a long one, its two ends."""
    return where if len(where) <= 2 * _PLACE_END else f"{where[:_PLACE_END]} ... {where[-_PLACE_END:]}"


def _checked_int(value: int, where: str) -> int:
    if value.bit_length() > INT_BITS_MAX:
        raise UnsupportedError(
            f"{_place(where)} is an integer of {value.bit_length()} bits; a checkpoint holds {INT_BITS_MAX} at most: "
            "write hex(x), or leave it out"
        )
    return value


def _checked_text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"{_place(where)} holds {value[error.start]!r}, which is no character (a file name in another encoding?): "
            "write os.fsencode(x), or leave it out"
        ) from None
    return value


def _unsupported(where: str, value: Any) -> UnsupportedError:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return UnsupportedError(
        f"{_place(where)} is of type {name}, and nothing but numbers, strings, bytes, None, lists, tuples, dicts, "
        f"arrays and tensors comes back from a checkpoint with its type: {_how_to_convert(value)}, or leave it out"
    )


def _how_to_convert(value: Any) -> str:
    """What to write in the place of ``value``, called x."""
    kind = type(value)
    for types, written in _CONVERSIONS:
        if isinstance(value, types):
            return f"write {written}"
    if kind.__module__ == "numpy":
        return "write torch.from_numpy(x)" if getattr(value, "shape", ()) else "write x.item()"
    for method in ("isoformat", "__fspath__"):
        if hasattr(kind, method):
            return "write str(x)"
    return "write vars(x)" if hasattr(value, "__dict__") and not callable(value) else "write what rebuilds it"


_CONVERSIONS: tuple[tuple[Any, str], ...] = (
    (Enum, "x.value"),
    (Tensor, "x.detach().clone()"),
    (int, "int(x)"),
    (float, "float(x)"),
    (str, "str(x)"),
    ((bytes, bytearray, memoryview), "bytes(x)"),
    (Mapping, "dict(x)"),
    (tuple, "tuple(x)"),
    ((list, set, frozenset, range, deque), "list(x)"),
    (complex, "(x.real, x.imag)"),
    ((torch.dtype, torch.device), "str(x)"),
)
"""Subclasses among others: they would come back as what they are made of, so that is for the program to say."""


def _encode_tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> Any:
    if value.dtype not in DTYPE_NAMES or value.layout is not torch.strided or value.is_meta:
        raise UnsupportedError(
            f"{_place(where)} is a tensor ({value.dtype}, {value.layout}, on {value.device}) that safetensors files "
            "cannot hold; convert it before saving"
        )
    value = value.detach()
    if not value.dim() and value.is_cpu and value.dtype in (torch.float32, torch.int64):  # step counts, mostly
        return {"$": "scalar", "dtype": DTYPE_NAMES[value.dtype], "value": _encode(value.item(), where, tensors, 0)}
    name = where
    while name in tensors:
        name += "'"
    tensors[name] = value
    return {"$": "tensor", "name": name}


def decode(value: Any, where: str, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of :func:`encode`.

    Args:
        tensor: gives the tensor of a name.

    Raises:
        UsageError: ``value`` is not what :func:`encode` makes.
    """
    try:
        return _decode(value, where, tensor)
    except RecursionError:
        raise UsageError(f"{where} is damaged: it is nested too deeply") from None


def _decode(value: Any, where: str, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, where, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _decode(item, where, tensor) for key, item in value.items()}
    try:
        return _decode_kind(value, where, tensor)
    except (KeyError, TypeError, ValueError, binascii.Error, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where}: {_shown(value)} is not a value that a checkpoint holds") from error


def _decode_kind(value: dict[str, Any], where: str, tensor: Callable[[str], Tensor]) -> Any:
    kind = value["$"]
    if kind == "float":
        return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[value["value"]])
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "tuple":
        return tuple(_decode(item, where, tensor) for item in _list(value["items"]))
    if kind in _MAPPINGS.values():
        pairs = [(_decode(key, where, tensor), _decode(item, where, tensor)) for key, item in _list(value["items"])]
        return {name: made for made, name in _MAPPINGS.items()}[kind](dict(pairs))
    if kind == "scalar":
        number = _decode(value["value"], where, tensor)
        return torch.tensor(number, dtype=_DTYPES[value["dtype"]], device="cpu")
    if kind == "tensor" and isinstance(value["name"], str):
        return tensor(value["name"])
    if kind in ("array", "numpy number"):
        found = _decode_array(value, _decode(value["bytes"], where, tensor))
        return found if kind == "array" else found[()]
    if kind == "namespace":
        return Namespace(**_decode(value["items"], where, tensor))
    raise UsageError(f"{where}: {_shown(value)} is of a kind that this version does not know")


def _decode_array(value: dict[str, Any], content: Tensor) -> np.ndarray[Any, Any]:
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in _NUMPY_KINDS or content.dtype is not torch.uint8:
        raise TypeError("no numbers")
    return np.frombuffer(content.numpy().tobytes(), dtype).reshape([int(length) for length in value["shape"]]).copy()


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _shown(value: Any) -> str:
    return clipped(repr(value), 80)


def clipped(text: str, length: int = 200) -> str:
    """A text from a file, for a message."""
    return text if len(text) <= length else text[: length - 3] + "..."


def parse_json(text: bytes, where: str) -> Any:
    """JSON from a file that may be anything.

    Raises:
        UsageError: it is no JSON, names a key twice, or is nested too deeply.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except RecursionError:
        raise UsageError(f"{where} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{where} is damaged: {str(error)[:200]}") from None


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
