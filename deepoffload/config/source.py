"""Reading what the user gave: a JSON file, a mapping, a ``Config``, or nothing."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from deepoffload.config.as_written import key_of
from deepoffload.config.hjson import NoHjson, read_hjson
from deepoffload.config.keys import AUTO
from deepoffload.config.lr_schedules import SCHEDULES
from deepoffload.config.schema import Config, DurabilityConfig, SchedulerConfig
from deepoffload.errors import ConfigError


def read_source(source: str | os.PathLike[str] | Mapping[str, object] | Config | None) -> tuple[dict[str, Any], str]:
    """The mapping that ``source`` stands for, and the name of the file for messages ("" when it is none).

    Raises:
        ConfigError: the file cannot be read, is not JSON or repeats a key; or ``source`` is something else.
    """
    if source is None:
        return {}, ""
    if isinstance(source, Config):
        return config_to_mapping(source), ""
    if isinstance(source, Mapping):
        return dict(source), ""
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if isinstance(name, str):
            encoded = None if os.path.exists(name) else _decoded(name)
            return (_read_file(name), name) if encoded is None else (_read_text(encoded, "in base64"), "in base64")
    raise ConfigError(
        f"a configuration is the path of a JSON file, a dict or a Config, not {type(source).__name__} ({source!r:.80})"
    )


def config_to_mapping(config: Config) -> dict[str, Any]:
    """The keys that give ``config`` again, without those that have their defaults."""
    result: dict[str, Any] = {}
    for item in dataclasses.fields(Config):
        value = getattr(config, item.name)
        if item.name in ("notes", "warnings") or value == getattr(_DEFAULTS, item.name):
            continue
        if isinstance(value, SchedulerConfig):
            result[item.name] = {"type": value.type, "params": _schedule_params(value)}
        elif dataclasses.is_dataclass(value) and not isinstance(value, DurabilityConfig):
            for part in dataclasses.fields(value):
                _put(result, key_of(f"{item.name}.{part.name}"), getattr(value, part.name))
        else:
            _put(result, key_of(item.name), value)
    return result


_DEFAULTS = Config()


def _schedule_params(schedule: SchedulerConfig) -> dict[str, Any]:
    """None in a schedule of DeepSpeed's is what "auto" became; torch's have it as a value."""
    other = AUTO if schedule.type in SCHEDULES else None
    return {name: other if given is None else given for name, given in schedule.params.items()}


def _put(mapping: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        mapping = mapping.setdefault(section, {})
    mapping[name] = value


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        hint = "; give JSON text as a dict (json.loads)" if path.lstrip().startswith("{") else ""
        raise ConfigError(f"configuration {path!r:.200}: cannot be read ({error.strerror}){hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path}: not UTF-8 text (byte {error.start})") from error
    return _read_text(text, path)


def _decoded(text: str) -> str | None:
    """The configuration that ``text`` is in base64, as DeepSpeed takes it, too; None where it is something else."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _read_text(text: str, path: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError(f"configuration {path} is empty. Write the keys into it, or {{}} where it needs none")
    try:
        value = _value_of(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"configuration {path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from error
    except _RepeatedKey as error:
        raise ConfigError(f'configuration {path}: the key "{error}" stands twice in one object') from error
    except _NoJson as error:
        raise ConfigError(f"configuration {path}: not valid JSON: {error} is not a number in JSON") from error
    except RecursionError as error:
        raise ConfigError(f"configuration {path}: nested too deeply") from error
    except ValueError as error:  # a number of more than 4300 digits
        raise ConfigError(f"configuration {path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"configuration {path}: expected an object {{...}}, not {type(value).__name__}")
    return value


def _value_of(text: str) -> Any:
    """What JSON says, or Hjson, which DeepSpeed reads; the error of text that is neither is that of JSON."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_no_constant)
    except json.JSONDecodeError:
        if not text.strip():
            raise
        try:
            return read_hjson(text, _without_repetition)
        except NoHjson:
            pass
        raise


class _RepeatedKey(Exception):
    pass


class _NoJson(Exception):
    pass


def _no_constant(name: str) -> None:
    """``NaN`` and ``Infinity``, which Python's parser takes."""
    raise _NoJson(name)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKey(key)
        result[key] = value
    return result
