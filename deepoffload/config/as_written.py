"""A configuration by the keys that people write."""

from __future__ import annotations

import dataclasses

from deepoffload.config.collect import KEYS, in_full
from deepoffload.config.schema import Config, OptimizerConfig, SchedulerConfig


def key_of(field: str) -> str:
    """The key that sets a field of :class:`Config`: ours where there is one."""
    if field in KEYS:
        return field
    return next((key.path for key in KEYS.values() if key.field == field), field)


def as_written(config: Config) -> dict[str, str]:
    """What a configuration says, as text, by dotted keys; of sections that it does not have, none. Notes and
    warnings are no keys."""
    said: dict[str, str] = {}
    for field in dataclasses.fields(config):
        if field.name in ("notes", "warnings"):
            continue
        value, key = getattr(config, field.name), key_of(field.name)
        if isinstance(value, (OptimizerConfig, SchedulerConfig)):
            said[f"{key}.type"] = in_full(value.type)
            said |= {f"{key}.params.{name}": in_full(each) for name, each in value.params.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = dataclasses.fields(value)
            said |= {key_of(f"{field.name}.{part.name}"): in_full(getattr(value, part.name)) for part in parts}
        else:
            said[key] = "not set" if value is None else in_full(value)
    return said
