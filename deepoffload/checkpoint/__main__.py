"""``python -m deepoffload.checkpoint``: see :mod:`deepoffload.checkpoint.convert.commands`."""

from __future__ import annotations

import sys

from deepoffload.checkpoint.convert.commands import run

if __name__ == "__main__":
    sys.exit(run())
