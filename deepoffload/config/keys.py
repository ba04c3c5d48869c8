"""What the tables of keys are made of: how a value is checked, and what becomes of a key."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepoffload.config.units import parse_bytes

AUTO = "auto"


class Mismatch(Exception):
    """A value does not fit its kind; the text, if any, is said instead of "expected <kind.expected>"."""


@dataclass(frozen=True)
class ValueKind:
    """A sort of value. ``normalise`` gives the value in our form or raises :class:`Mismatch`."""

    expected: str
    normalise: Callable[[object], object]


class Treatment(enum.Enum):
    """What becomes of a key of DeepSpeed's dialect."""

    HONOURED = "honoured"
    """It means here what it means there."""
    MAPPED = "mapped"
    """It becomes a key or a behaviour of ours; a note says which."""
    INAPPLICABLE = "inapplicable"
    """There is nothing here for it to set; a note says why."""
    ERROR = "error"
    """Ignoring it would change numbers. Its default and the values in ``harmless`` are accepted."""


@dataclass(frozen=True)
class Key:
    """One key of the configuration, by its dotted path."""

    path: str
    kind: ValueKind
    treatment: Treatment
    text: str
    default: object = None
    harmless: tuple[object, ...] = ()
    field: str | None = None
    """The path of ours that it sets, where it sets one."""
    convert: Callable[[object], object] | None = None
    """From the checked value to the field's value; ``None`` as the result says nothing."""
    same_as: str | None = None
    """The path of the key of which this is another name."""

    @property
    def first_path(self) -> str:
        """The path that all names of this key have in common."""
        return self.same_as or self.path

    def means_auto(self, value: object) -> bool:
        """Whether ``value`` asks somebody else to decide. ``"auto"`` is an ordinary value where it is the default."""
        if not (isinstance(value, str) and value == AUTO):
            return False
        try:
            return self.default is None or self.kind.normalise(value) != self.default
        except Mismatch:
            return True


def boolean() -> ValueKind:
    def normalise(value: object) -> object:
        if not isinstance(value, bool):
            quoted = isinstance(value, str) and value.strip().lower() in ("true", "false")
            raise Mismatch("expected true or false without quotes" if quoted else "")
        return value

    return ValueKind("true or false", normalise)


def integer(low: int = 0, high: int | None = None, multiple: int = 1) -> ValueKind:
    """Whole numbers from ``low`` to ``high``; JSON's ``5e8`` is one."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if multiple > 1:
        expected += f" that is a multiple of {multiple}"

    def normalise(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch
        if isinstance(value, float) and not value.is_integer():
            raise Mismatch
        if value < low or (high is not None and value > high) or int(value) % multiple:
            raise Mismatch
        return int(value)

    return ValueKind(expected, normalise)


def interval() -> ValueKind:
    """Whole numbers from 0; a program's infinity means never, which is 0."""
    whole = integer(0)

    def normalise(value: object) -> object:
        return 0 if value == math.inf else whole.normalise(value)

    return ValueKind(whole.expected, normalise)


def number(low: float | None = None, high: float | None = None, below: float | None = None) -> ValueKind:
    """Finite numbers from ``low`` to ``high``, or under ``below``."""
    limits = [f"at least {low:g}" if low is not None else "", f"at most {high:g}" if high is not None else ""]
    limits.append(f"below {below:g}" if below is not None else "")
    words = " and ".join(limit for limit in limits if limit)

    def normalise(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch
        try:
            value = float(value)
        except OverflowError:
            raise Mismatch from None
        if not math.isfinite(value):
            raise Mismatch
        if (low is not None and value < low) or (high is not None and value > high):
            raise Mismatch
        if below is not None and value >= below:
            raise Mismatch
        return value

    return ValueKind(f"a finite number {words}".strip(), normalise)


def text() -> ValueKind:
    def normalise(value: object) -> object:
        if not isinstance(value, str):
            raise Mismatch
        return value

    return ValueKind("text", normalise)


def choice(options: Mapping[str, object]) -> ValueKind:
    """One of the texts in ``options``, in any case of letters, or the member of an enum it stands for."""
    lowered = {name.lower(): meaning for name, meaning in options.items()}

    def normalise(value: object) -> object:
        if isinstance(value, enum.Enum) and value in options.values():
            return value
        if not isinstance(value, str) or value.lower() not in lowered:
            raise Mismatch
        return lowered[value.lower()]

    return ValueKind("one of " + ", ".join(f'"{name}"' for name in options), normalise)


def choice_of(*options: str) -> ValueKind:
    return choice({option: option for option in options})


def size(low: int = 0) -> ValueKind:
    """Bytes, as :func:`deepoffload.config.units.parse_bytes` reads them."""

    def normalise(value: object) -> object:
        try:
            count = parse_bytes(value)  # type: ignore[arg-type]
        except ValueError as error:
            raise Mismatch(str(error)) from None
        if count < low:
            raise Mismatch
        return count

    return ValueKind(f'bytes (at least {low}), such as 2147483648 or "2GiB"', normalise)


def paths() -> ValueKind:
    """One directory or a list of them; the result is a tuple of texts."""

    def normalise(value: object) -> object:
        listed = value if isinstance(value, (list, tuple)) else [value]
        result = []
        for item in listed:
            if not isinstance(item, (str, os.PathLike)):
                raise Mismatch
            name = os.fspath(item)
            if not isinstance(name, str) or not name.strip() or "\0" in name:
                raise Mismatch
            result.append(os.path.expanduser(name))
        if len(set(result)) != len(result):
            raise Mismatch("expected directories that differ from each other")
        return tuple(result)

    return ValueKind("a directory or a list of directories", normalise)


def names_or_classes(least: int = 0) -> ValueKind:
    """One name or class, or a list of at least so many; the result is a tuple."""

    def normalise(value: object) -> object:
        listed = value if isinstance(value, (list, tuple)) else [value]
        for item in listed:
            if not isinstance(item, type) and (not isinstance(item, str) or not item.strip(". ")):
                raise Mismatch
        if len(listed) < least:
            raise Mismatch("expected at least one name; what a model of transformers names itself always stays in fp32")
        return tuple(dict.fromkeys(item.strip(".") if isinstance(item, str) else item for item in listed))

    return ValueKind("a name, a class of modules, or a list of these", normalise)


def list_of(item: ValueKind, length: int | None = None) -> ValueKind:
    """A list whose items are all of one kind; the result is a tuple."""

    def normalise(value: object) -> object:
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise Mismatch
        return tuple(item.normalise(element) for element in value)

    many = "a list" if length is None else f"a list of {length}"
    return ValueKind(f"{many}, each {item.expected}", normalise)


def either(*kinds: ValueKind) -> ValueKind:
    """The first of several kinds that fits."""

    def normalise(value: object) -> object:
        for kind in kinds:
            try:
                return kind.normalise(value)
            except Mismatch:
                continue
        raise Mismatch

    return ValueKind(" or ".join(kind.expected for kind in kinds), normalise)


def mapping() -> ValueKind:
    """An object whose content is looked at later, or not at all."""

    def normalise(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Mismatch
        return dict(value)

    return ValueKind("an object", normalise)


def switched_group() -> ValueKind:
    """An object with ``enabled``; the result is ``"on"`` or ``"off"`` (the default)."""

    def normalise(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Mismatch
        enabled = value.get("enabled", False)
        if enabled in (AUTO, None):
            enabled = False
        if not isinstance(enabled, bool):
            raise Mismatch
        return "on" if enabled else "off"

    return ValueKind('an object with "enabled": true or false', normalise)


def present_group() -> ValueKind:
    """An object that is on by being there; the result is ``"on"``, or ``"off"`` when it is empty or says so."""

    def normalise(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Mismatch
        return "on" if value and value.get("enabled") is not False else "off"

    return ValueKind("an object", normalise)


def cut_group(*degrees: str) -> ValueKind:
    """An object that says in how many parts to cut; the result is ``"on"``, or ``"off"`` where each of ``degrees`` that
    it says is at most 1, or where it says that it is off."""

    def normalise(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Mismatch
        said = [value[name] for name in degrees if name in value]
        if value.get("enabled") is False or (said and all(isinstance(degree, int) and degree <= 1 for degree in said)):
            return "off"
        return "on" if value else "off"

    return ValueKind("an object", normalise)


def group_of_parts(*parts: str) -> ValueKind:
    """An object of ``parts``, each an object with ``enabled``, in itself or in its ``shared_parameters``; the result is
    ``"on"``, or ``"off"`` when every part is off (the default)."""

    def is_on(name: str, part: object) -> bool:
        if name not in parts:
            raise Mismatch(f"unknown part {name!r}; expected {', '.join(parts)}")
        shared = part.get("shared_parameters", {}) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(shared, Mapping):
            raise Mismatch(f"part {name!r}: expected an object")
        said = (part.get("enabled", False), shared.get("enabled", False))
        if not all(isinstance(enabled, bool) for enabled in said):
            raise Mismatch(f'part {name!r}: expected "enabled": true or false without quotes')
        return any(said)

    def normalise(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Mismatch
        states = [is_on(str(name), part) for name, part in value.items()]  # all of them are checked
        return "on" if any(states) else "off"

    return ValueKind('an object of parts, each with "enabled": true or false', normalise)


def keys_by_path(*tables: Sequence[Key]) -> dict[str, Key]:
    """One mapping of several tables. Each path is in one table only (a test holds it)."""
    return {key.path: key for table in tables for key in table}


def renamed(key: Key, path: str) -> Key:
    """Another name of a key: both may be said if they say the same."""
    return replace(key, path=path, same_as=key.first_path)


def honoured(path: str, kind: ValueKind, what: str, default: object = None, field: str | None = None) -> Key:
    """A key of DeepSpeed's that means the same here."""
    return Key(path, kind, Treatment.HONOURED, what, default, field=field or path)


def inapplicable(path: str, kind: ValueKind, why: str, default: object = None, field: str | None = None) -> Key:
    """A key of DeepSpeed's that changes nothing here, and why. ``field``: where the parser finds it all the same, which
    refuses it where there are several ranks."""
    return Key(path, kind, Treatment.INAPPLICABLE, why, default, field=field)


def refused(path: str, kind: ValueKind, why: str, default: object = None, *harmless: object) -> Key:
    """A key of DeepSpeed's that is an error unless its value is the default or one of the ``harmless``."""
    return Key(path, kind, Treatment.ERROR, why, default, (default, *harmless))
