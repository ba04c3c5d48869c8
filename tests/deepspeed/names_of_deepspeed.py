"""Writes the names of the DeepSpeed that this Python has to a JSON file: by module, those that are its own.

Run it with a Python that has DeepSpeed 0.19.8::

    python tests/deepspeed/names_of_deepspeed.py tests/deepspeed/names_0.19.8.json
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

ATTRIBUTES = (
    "global_rank local_rank device module optimizer lr_scheduler global_steps skipped_steps micro_steps global_samples "
    "training_dataloader world_size dp_world_size mp_world_size"
).split()
"""Attributes of its engine's objects that scripts read; a class does not name them."""


HOMES = {
    "zero": "deepspeed.runtime.zero",
    "utils": "deepspeed.utils",
    "checkpointing": "deepspeed.runtime.activation_checkpointing",
    "comm": "deepspeed.comm.comm",
}
"""Where the functions and classes come from that are a module's own, not imported for its use."""


def names_from(module: types.ModuleType, home: str) -> list[str]:
    """Its public functions, classes and modules that were made in ``home`` or below."""
    found = []
    for name in dir(module):
        value = getattr(module, name)
        made_in = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if not name.startswith("_") and str(made_in).startswith(home):
            found.append(name)
    return sorted(found)


def callables_from(module: types.ModuleType, home: str) -> list[str]:
    return [name for name in names_from(module, home) if callable(getattr(module, name))]


def main() -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch import nn

    engine = {name for name in dir(DeepSpeedEngine) if name not in dir(nn.Module)} | set(vars(DeepSpeedEngine))
    names = {
        "version": deepspeed.__version__,
        "engine": sorted({*ATTRIBUTES, *(name for name in engine if not name.startswith("_"))}),
        "deepspeed": sorted({*names_from(deepspeed, "deepspeed"), "logger"}),
        **{name: callables_from(getattr(deepspeed, name), home) for name, home in HOMES.items()},
        "accelerator": sorted(name for name in dir(get_accelerator()) if not name.startswith("_")),
    }
    Path(sys.argv[1]).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
