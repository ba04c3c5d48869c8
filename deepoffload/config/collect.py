"""From nested mappings to checked values of our own fields, with a note for every key that is not simply honoured."""

from __future__ import annotations

import difflib
import enum
import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from deepoffload.config.deepspeed_keys import BOOLEAN_SECTIONS, DEEPSPEED_KEYS, TOLERANT_SECTIONS
from deepoffload.config.deepspeed_tool_keys import DEEPSPEED_TOOL_KEYS
from deepoffload.config.keys import AUTO, Key, Mismatch, Treatment, ValueKind, keys_by_path
from deepoffload.config.lr_schedules import WARMUP_TYPE, unknown_warmup
from deepoffload.config.own_keys import OWN_KEYS
from deepoffload.errors import ConfigError

KEYS = keys_by_path(OWN_KEYS, DEEPSPEED_KEYS, DEEPSPEED_TOOL_KEYS)
SCHEDULE = "scheduler.params"
"""Of the parameters in it the schedule's type decides; see ``lr_schedules``."""
SECTIONS = frozenset(path[:at] for path in KEYS for at, letter in enumerate(path) if letter == ".")
_OWN_PATHS = frozenset(key.path for key in OWN_KEYS)


@dataclass
class Layer:
    """One mapping, read: the fields it sets, which key set each, and what to tell the user.

    ``strict``: every unknown key is an error (DeepSpeed ignores some of a file's). ``autos``: paths
    that say ``"auto"``. ``said``: what each key says, by its first path, with the path under which it does. ``unset``:
    fields that a key is about whose value sets nothing (``bf16.enabled = false``), with its first path.
    """

    where: str
    strict: bool = False
    fields: dict[str, object] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    said: dict[str, tuple[str, object]] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)

    def collect(self, mapping: Mapping[str, object], prefix: str = "") -> Layer:
        """Check every key of ``mapping`` and take over what it says.

        Raises:
            ConfigError: a key is unknown, a value does not fit, two keys disagree, or ignoring one changes numbers.
        """
        for name, value in mapping.items():
            if not isinstance(name, str):
                raise ConfigError(f"{self.where}{prefix}{name!r}: keys are text")
            path = prefix + name
            if path in KEYS:
                self._take(KEYS[path], value)
            elif path not in SECTIONS:
                message = f"{self.where}{path}: unknown key"
                if self.strict or (prefix and prefix[:-1] not in TOLERANT_SECTIONS):
                    raise ConfigError(f"{message}{suggestion(path)}")
                self.warnings.append(f"{message}, ignored{suggestion(path)}")
            elif isinstance(value, Mapping):
                self.collect(value, path + ".")
            elif isinstance(value, bool) and path in BOOLEAN_SECTIONS:
                self._take(KEYS[BOOLEAN_SECTIONS[path]], int(value))
            elif value is None or value == AUTO:
                self.fields.update(dict.fromkeys(_fields_below(path)))
                if value == AUTO:
                    self.autos.append(path)
            else:
                stages = ', such as {"stage": 1}, or true or false' if path in BOOLEAN_SECTIONS else ""
                raise ConfigError(f"{self.where}{path} = {shown(value)}: expected an object{stages}")
        return self

    def _take(self, key: Key, raw: object) -> None:
        if raw is None or key.means_auto(raw):
            if raw is not None:
                self.autos.append(key.path)
            if key.field is not None:
                self.fields.setdefault(key.field, None)
            return
        value = self._checked(key, raw)
        path, before = self.said.setdefault(key.first_path, (key.path, value))
        if before != value:
            raise self._contradiction(path, before, key.path, value)
        if key.treatment is Treatment.ERROR and value not in key.harmless:
            raise ConfigError(f"{self.where}{key.path} = {shown(raw)}: ignoring it would change numbers: {key.text}")
        if value != key.default and key.treatment in (Treatment.MAPPED, Treatment.INAPPLICABLE):
            said = f" = {shown(raw)}" if key.treatment is Treatment.MAPPED else ""
            self.notes.append(f"{key.path}{said}: {key.treatment.value}: {key.text}")
        if key.path == SCHEDULE:
            parameters = cast("dict[str, object]", value)
            self.autos += [f"{SCHEDULE}.{name}" for name, each in parameters.items() if each == AUTO]
            if unknown_warmup(parameters):
                said = shown(parameters[WARMUP_TYPE])
                self.warnings.append(f'{self.where}{SCHEDULE}.{WARMUP_TYPE} = {said}: taken as "log", as by DeepSpeed')
        if key.field is not None:
            self._set(key.field, key.path, key.convert(value) if key.convert is not None else value)

    def _checked(self, key: Key, raw: object) -> object:
        """The value in our form. DeepSpeed reads quoted numbers and switches as what they say, and so do we."""
        where = f"{self.where}{key.path}"
        plain = _unquoted(raw) if key.path not in _OWN_PATHS and isinstance(raw, str) else None
        if plain is None or _fits(key.kind, raw):
            return check(key.kind, raw, where)
        value = check(key.kind, plain, where)
        self.warnings.append(f"{where} = {shown(raw)}: text, read as {shown(plain)}; write it without quotes")
        return value

    def _set(self, field_name: str, path: str, value: object) -> None:
        if value is None:
            self.unset[field_name] = KEYS[path].first_path
            return
        before = self.fields.get(field_name)
        if before is not None and before != value:
            raise self._contradiction(self.origin[field_name], before, path, value)
        self.fields[field_name] = value
        self.origin[field_name] = path

    def _contradiction(self, path: str, value: object, other: str, other_value: object) -> ConfigError:
        return ConfigError(
            f"{self.where}{path} and {other} contradict each other ({shown(value)} and {shown(other_value)}); leave "
            "one out"
        )

    def takes_back(self, below: Layer) -> list[str]:
        """Fields that ``below`` sets by a key which this layer gives a value that sets nothing."""
        return [
            name
            for name, first_path in self.unset.items()
            if name in below.origin and KEYS[below.origin[name]].first_path == first_path
        ]


def _fields_below(section: str) -> list[str]:
    return [key.field for key in KEYS.values() if key.field is not None and key.field.startswith(section + ".")]


def _unquoted(text: str) -> bool | int | float | None:
    """The number, true or false that a text says; None for another text."""
    lowered = text.strip().lower()
    try:
        value = json.loads(lowered)
    except ValueError:
        return None
    return value if isinstance(value, (bool, int, float)) else None


def _fits(kind: ValueKind, raw: object) -> bool:
    try:
        kind.normalise(raw)
    except Mismatch:
        return False
    return True


def check(kind: ValueKind, raw: object, where: str) -> object:
    """``raw`` in our form, or a ``ConfigError`` that says where it stands and what was expected."""
    if isinstance(raw, numbers.Real) and not isinstance(raw, (int, float)) and hasattr(raw, "item"):
        raw = raw.item()  # one of NumPy's
    try:
        return kind.normalise(raw)
    except Mismatch as mismatch:
        raise ConfigError(f"{where} = {shown(raw)}: {str(mismatch) or 'expected ' + kind.expected}") from None


def shown(value: object) -> str:
    """A value as it stands in a message, cut to a line."""
    text = in_full(value)
    return text if len(text) <= 80 else text[:77] + "..."


def in_full(value: object) -> str:
    """The same uncut: values with the same text are equal."""
    if isinstance(value, enum.Enum):
        value = value.value
    try:
        return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    except ValueError:  # Python shows no integers of more than 4300 digits
        return f"({type(value).__name__} of very many digits)"


def suggestion(path: str) -> str:
    """``; did you mean ...?`` for an unknown path: the same name elsewhere, or the nearest spelling."""
    if path.startswith("_"):
        return ""  # people write comments so
    paths = sorted(KEYS.keys() | SECTIONS)
    name = path.rpartition(".")[2]
    same_name = [other for other in paths if other.rpartition(".")[2] == name]
    if same_name:
        return f"; did you mean {' or '.join(same_name[:3])}?"
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
    if not near:
        tails = {other.rpartition(".")[2]: other for other in reversed(paths)}
        near = [tails[tail] for tail in difflib.get_close_matches(name, tails, n=1, cutoff=0.6)]
    return f"; did you mean {near[0]}?" if near else "; docs/config.md lists all keys"
