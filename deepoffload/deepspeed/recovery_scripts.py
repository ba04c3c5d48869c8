"""``zero_to_fp32.py`` and ``zero_to_torch.py`` next to checkpoints, as DeepSpeed leaves them there."""

from __future__ import annotations

import contextlib
import os

from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.checkpoint.several_ranks import Alive

NAMES = ("zero_to_fp32", "zero_to_torch")

_SCRIPT = """#!/usr/bin/env python
\"\"\"Makes files of weights of the checkpoints in this folder; --help says how.\"\"\"

from deepoffload.deepspeed.utils.{name} import main

if __name__ == "__main__":
    main()
"""


def write_scripts(directory: str, alive: Alive) -> None:
    """Write those that are not there.

    Raises:
        IoFailure: no room on the disk, or it failed.
    """
    alive()
    for name in NAMES:
        path = os.path.join(directory, f"{name}.py")
        if os.path.exists(path):
            continue
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(_SCRIPT.format(name=name))
            os.chmod(path, 0o755)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise failure("writing a script next to the checkpoints", error, path, 0) from error
