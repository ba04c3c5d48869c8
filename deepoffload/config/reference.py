"""Writes the reference of all configuration keys: ``python -m deepoffload.config.reference > docs/config.md``."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable

from deepoffload.config.deepspeed_keys import DEEPSPEED_KEYS, TOLERANT_SECTIONS
from deepoffload.config.deepspeed_tool_keys import DEEPSPEED_TOOL_KEYS
from deepoffload.config.keys import Key, Treatment
from deepoffload.config.lr_schedules import SCHEDULES
from deepoffload.config.own_keys import OWN_KEYS

_HEAD = """\
# Configuration

<!-- Written by `python -m deepoffload.config.reference > docs/config.md`; do not edit. -->

A configuration is the path of a JSON file, a dict, a `deepoffload.Config`, keywords, or nothing at all:

```python
with deepoffload.offload_context("offload.json", host_budget="4GiB", nvme_path="/mnt/nvme"):
    model = build()
```

Our own keys and DeepSpeed's stand side by side, at the top level of one JSON object. Keywords win over the file; a
nested key is a dict (`aio={"queue_depth": 32}`). `null` means "not said", for every key. So does `"auto"`, which a
trainer should have filled in: one warning lists every `"auto"` and what it became.

A file may be Hjson, as for DeepSpeed: comments, fewer commas and quotes. No key may be repeated. A quoted number or
`"true"` is read as what it says, with a warning, where the key is DeepSpeed's. An unknown key is an error that names
the nearest one. It is a warning where DeepSpeed ignores it and numbers stay: at the top level of a file or dict, and in
UNKNOWN_IN. Each warning is logged once per process. DeepSpeed's keys are those of 0.19.8 and older ones. Where
DeepSpeed takes two names for a key, so do we, if both say the same.
`zero_optimization` may be `true` (stage 1) or `false`.

Sizes are numbers of bytes or text: `"500MB"` is 500 · 1000², `"2GiB"` is 2 · 1024³. "Not said" below means that the
budgets, the machine or the caller decide, and that the placement table says how.
"""

_TREATMENTS = {
    Treatment.HONOURED: "Honoured: they mean here what they mean in DeepSpeed",
    Treatment.MAPPED: "Mapped: they become a key or behaviour of ours, and a note says so once",
    Treatment.ERROR: "Refused, because ignoring them would change numbers (their default is accepted)",
    Treatment.INAPPLICABLE: "Inapplicable: accepted, and a note says once why there is nothing to set",
}


def markdown() -> str:
    """The whole page."""
    tolerant = ", ".join(f"`{section}`" for section in sorted(TOLERANT_SECTIONS))
    parts = [_HEAD.replace("UNKNOWN_IN", tolerant), "\n## Our own keys\n\n", _table(OWN_KEYS, "Meaning")]
    parts.append("\n## DeepSpeed's keys\n")
    keys = (*DEEPSPEED_KEYS, *DEEPSPEED_TOOL_KEYS)
    for treatment, title in _TREATMENTS.items():
        column = "Meaning" if treatment is Treatment.HONOURED else "Here"
        parts.append(f"\n### {title}\n\n{_table((key for key in keys if key.treatment is treatment), column)}")
    parts.append("\n## Learning rate schedules\n\n`scheduler.params` by `scheduler.type`, as in DeepSpeed.\n")
    for name, parameters in SCHEDULES.items():
        rows = [
            f"| `{parameter_name}` | {parameter.kind.expected} | "
            f"{'required' if parameter.required else _shown(parameter.default)} |"
            for parameter_name, parameter in parameters.items()
        ]
        parts.append(f"\n### {name}\n\n| Parameter | Value | Default |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _table(keys: Iterable[Key], column: str) -> str:
    rows = [f"| `{key.path}` | {key.kind.expected} | {_shown(key.default)} | {key.text} |" for key in keys]
    return f"| Key | Value | Default | {column} |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _shown(value: object) -> str:
    if value is None or value == ():
        return "not said"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
