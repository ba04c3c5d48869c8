"""What becomes of a name of DeepSpeed's: here, here with another meaning, or not here and what to use in its place."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from deepoffload.errors import UnsupportedError


class Presence(enum.Enum):
    """Whether a name of DeepSpeed's exists here."""

    HERE = "here"
    """It does here what it does there."""
    OTHERWISE = "here, with another meaning"
    """It exists, and the text says what differs."""
    ABSENT = "not here"
    """Using it raises an error with the text, which says why, or what to use."""


@dataclass(frozen=True)
class PeerName:
    """One name of DeepSpeed's surface."""

    presence: Presence
    text: str = ""


class AbsentNameError(UnsupportedError, AttributeError):
    """An attribute of DeepSpeed's that is not here; ``hasattr`` says False of it."""


HERE = PeerName(Presence.HERE)


def otherwise(text: str) -> PeerName:
    """A name that is here with another meaning."""
    return PeerName(Presence.OTHERWISE, text)


def absent(text: str) -> PeerName:
    """A name that is not here."""
    return PeerName(Presence.ABSENT, text)


def all_of(names: str, name: PeerName) -> dict[str, PeerName]:
    """The same for several names, which stand in one text."""
    return dict.fromkeys(names.split(), name)


def refuse(path: str, why: str) -> NoReturn:
    """Raise UnsupportedError for a name of DeepSpeed's that is not here."""
    raise UnsupportedError(f"{path} is not in deepoffload: {why}")


def absent_object(path: str, why: str) -> Any:
    """What stands in the place of a class or function that is not here.

    Scripts import such names at their top and use them in one of their modes only, so it is the use that raises
    UnsupportedError. ``isinstance(x, it)`` is False.
    """
    name = path.rpartition(".")[2]
    if name[:1].isupper():
        return type(name, (), {"__new__": _refusing(path, why), "__doc__": why})
    return _refusing(path, why)


def _refusing(path: str, why: str) -> Callable[..., NoReturn]:
    def refusal(*args: object, **kwargs: object) -> NoReturn:
        refuse(path, why)

    return refusal


def look_up(table: Mapping[str, PeerName], path: str, shown: str) -> Any:
    """What a module's ``__getattr__`` gives for a name that it does not define.

    Raises:
        AttributeError: the table has no such absent name.
    """
    known = table.get(path)
    if known is None or known.presence is not Presence.ABSENT:
        raise AttributeError(
            f"module '{shown}' has no attribute {path.rpartition('.')[2]!r}; docs/from_deepspeed.md lists the names "
            "of DeepSpeed that are here"
        )
    return absent_object(f"deepspeed.{path}", known.text)


def submodules(package: str, modules: tuple[str, ...], prefix: str) -> Callable[[str], Any]:
    """A package's ``__getattr__``: loads its modules when they are first used, and knows the names that are not here.

    Args:
        prefix: of the package's names in the table.
    """

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from deepoffload.deepspeed.package_table import PACKAGE_NAMES

        return look_up(PACKAGE_NAMES, f"{prefix}.{name}", package)

    return find
