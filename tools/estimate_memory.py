"""Will it fit, and how fast: ``python tools/estimate_memory.py --help`` (as ``python -m deepoffload.estimate``)."""

from __future__ import annotations

import sys

from deepoffload.estimate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(prog="tools/estimate_memory.py"))
